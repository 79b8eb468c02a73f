// The search takes words that begin with a dash for words to leave out, but here they are flags.
document.addEventListener(
  "input",
  ({ target }) => {
    if (target.matches("[data-md-component=search-query]")) {
      target.value = target.value.replace(/(^|\s)-+/g, "$1");
    }
  },
  true,
);
