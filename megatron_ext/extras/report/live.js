// Asks the server for changes, and puts the new content of the page in place of the old one.
"use strict";
(() => {
  const SECONDS = 3;
  const status = document.getElementById("live");
  let tag = null, pressed = false;
  addEventListener("pointerdown", () => { pressed = true; });
  addEventListener("pointerup", () => { pressed = false; });

  function replace(text) {
    const page = new DOMParser().parseFromString(text, "text/html");
    const open = [...document.querySelectorAll("main details")].map((details) => details.open);
    const focused = document.activeElement?.id;
    const { scrollX, scrollY } = window;
    for (const part of ["main", "header > div"]) {
      document.querySelector(part).replaceWith(document.adoptNode(page.querySelector(part)));
    }
    document.title = page.title;
    [...document.querySelectorAll("main details")].forEach((details, i) => {
      if (i < open.length) details.open = open[i];
    });
    curves.start();
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
    window.scrollTo(scrollX, scrollY);
  }

  async function refresh() {
    if (!document.hidden && !pressed) {
      try {
        const answer = await fetch(location.pathname, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
        if (answer.status === 200) {
          tag = answer.headers.get("ETag");
          replace(await answer.text());
        }
        status.textContent = answer.ok || answer.status === 304 ? "live" : `the server answers ${answer.status}`;
      } catch {
        status.textContent = "the server does not answer; the page may be out of date";
      }
    }
    setTimeout(refresh, SECONDS * 1000);
  }
  setTimeout(refresh, SECONDS * 1000);
})();
