// Draws the curves of the page's data block with uPlot, and answers to the tools above them.
"use strict";
const curves = (() => {
  const LEVELS = [0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1];
  const view = { zoom: null, axis: "iteration", level: null, log: new Set(), hidden: new Set() };
  const byId = (id) => document.getElementById(id);
  let charts = [], data = null, whole = [0, 1];

  const short = (v) => v === 0 ? "0" : !Number.isFinite(v) ? "not finite"
    : Math.abs(v) >= 1e6 || Math.abs(v) < 1e-4 ? v.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e")
    : Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4));

  const timed = () => view.axis === "hours" || view.axis === "minutes";

  // A canvas knows no CSS variables, so that an element resolves them for the current theme.
  const probe = document.createElement("i");
  probe.hidden = true;
  document.body.append(probe);
  const colour = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const faded = (name) => colour(name).replace(/^rgb\((.*)\)$/, "rgba($1, 0.28)");

  // Returns the index of the value in rising `xs` that is nearest to `x`.
  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - xs[low - 1] <= xs[low] - x ? low - 1 : low;
  }

  // Converts iterations of a run to the chosen x axis.
  function converted(run, xs) {
    if (view.axis === "iteration") return xs;
    const from = data.progress[run].iteration, to = data.progress[run][view.axis];
    let place = 0;
    return xs.map((x) => {
      while (place < from.length - 2 && from[place + 1] < x) place += 1;
      const width = from[place + 1] - from[place] || 1;
      return to[place] + (to[place + 1] - to[place]) * (x - from[place]) / width;
    });
  }

  // An exponential moving average over the x axis without bias at its start.
  function smoothed(xs, ys, width) {
    let mean = 0, weight = 0, last = xs[0];
    return ys.map((y, i) => {
      if (y === null) return null;
      const keep = Math.exp((last - xs[i]) / width);
      last = xs[i];
      mean = keep * mean + y;
      weight = keep * weight + 1;
      return mean / weight;
    });
  }

  // Returns the tables that uPlot joins, and how each is drawn.
  function lines(chart) {
    const tables = [], styles = [];
    const usable = (ys) => chart.log ? ys.map((y) => y > 0 ? y : null) : ys;
    const width = LEVELS[view.level] * (whole[1] - whole[0]);
    for (const series of chart.series) {
      if (view.hidden.has(series.name)) continue;
      const smooth = chart.smooth && !series.dots && width > 0 && series.xs.length > 2;
      const raw = { stroke: () => smooth ? faded(series.colour) : colour(series.colour), dash: series.dash,
        width: smooth ? 1 : 1.6, spanGaps: false, paths: uPlot.paths.linear(),
        points: { show: series.dots || series.xs.length < 40, size: series.dots ? 6 : 4,
          fill: () => colour(series.colour) } };
      tables.push([series.xs, usable(series.y)]);
      styles.push(raw);
      series.shown = null;
      if (smooth) {
        const xs = series.means ? series.meanXs : series.xs, ys = series.means ? series.means.y : series.y;
        series.shown = [xs, smoothed(xs, ys, width)];
        tables.push([xs, usable(series.shown[1])]);
        styles.push({ ...raw, stroke: () => colour(series.colour), width: 1.8, points: { show: false } });
      }
    }
    return [tables.length ? uPlot.join(tables.map(unique)) : [[0]], styles];
  }

  // uPlot joins by x, of which each table must hold each value once.
  function unique([xs, ys]) {
    if (!xs.some((x, i) => i > 0 && x <= xs[i - 1])) return [xs, ys];
    const kept = new Map(xs.map((x, i) => [x, ys[i]]));
    const sorted = [...kept.keys()].sort((a, b) => a - b);
    return [sorted, sorted.map((x) => kept.get(x))];
  }

  // Round values at which a logarithmic axis has its lines: of each decade, or of a part of one.
  function logTicks(low, high) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1)
      for (const digit of high / low > 1e4 ? [1] : [1, 2, 5]) ticks.push(digit * 10 ** power);
    const inside = ticks.filter((tick) => tick >= low && tick <= high);
    if (inside.length > 1) return inside;
    const step = 10 ** Math.floor(Math.log10(high - low)) / 2;
    return Array.from({ length: 30 }, (_, i) => (Math.ceil(low / step) + i) * step).filter((t) => t <= high);
  }

  function limits(chart, low, high) {
    if (low === null || low === undefined) return chart.log ? [0.1, 1] : [0, 1];
    if (chart.log) return low < high ? [low / (high / low) ** 0.04, high * (high / low) ** 0.04] : [low / 1.5, high * 1.5];
    const margin = low < high ? 0.05 * (high - low) : Math.abs(low) * 0.05 || 1;
    return [low - margin, high + margin];
  }

  function plotted(chart) {
    if (chart.plot) chart.plot.destroy();
    const [joined, styles] = lines(chart);
    const axis = { stroke: () => colour("faint"), font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif",
      grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false } };
    const options = {
      width: chart.box.clientWidth, height: chart.box.clientHeight, legend: { show: false }, padding: [10, 28, 0, 0],
      cursor: { y: false, drag: { x: true, y: false, setScale: false }, points: { show: false },
        sync: { key: "curves", scales: ["x", null], setSeries: false,
          filters: { pub: (kind) => kind === "mousemove" || kind === "mouseleave" } },
        bind: { dblclick: () => () => zoom(null) } },
      scales: { x: { time: false, range: () => view.zoom || whole },
        y: { distr: chart.log ? 3 : 1, range: (_, low, high) => limits(chart, low, high) } },
      axes: [
        { ...axis, size: 26, gap: 4, space: 70, values: (_, ticks) => ticks.map(short) },
        { ...axis, size: (_, ticks) => 16 + 7 * Math.max(2, ...(ticks || []).map((tick) => tick.length)), gap: 6, space: 30, values: (_, ticks) => ticks.map(short),
          ...(chart.log && { splits: (_, __, low, high) => logTicks(low, high), filter: (_, ticks) => ticks }) },
      ],
      series: [{}, ...styles],
      hooks: {
        draw: [(plot) => decorate(chart, plot)],
        setCursor: [(plot) => tell(chart, plot)],
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          if (width > 5) zoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
        }],
      },
    };
    chart.plot = new uPlot(options, joined, chart.box);
    chart.tip = document.createElement("div");
    chart.tip.className = "tip";
    chart.tip.hidden = true;
    if (document.activeElement === chart.box) chart.tip.setAttribute("role", "status");
    chart.plot.over.append(chart.tip);
    chart.flags = data.marks.map((mark) => {
      const link = document.createElement("a");
      link.className = `flag ${mark.kind}`;
      link.href = `#${mark.target}`;
      link.title = mark.text;
      link.setAttribute("aria-label", mark.text);
      chart.plot.over.append(link);
      return link;
    });
    place(chart);
  }

  function place(chart) {
    const { min, max } = chart.plot.scales.x;
    chart.flags.forEach((link, i) => {
      const share = (chart.marks[i] - min) / (max - min);
      link.hidden = !(share >= 0 && share <= 1);
      link.style.left = `${100 * share}%`;
    });
  }

  // Draws the lines of marks, and triangles where a value is not finite.
  function decorate(chart, plot) {
    const { ctx, bbox } = plot, { min, max } = plot.scales.x, ratio = devicePixelRatio || 1;
    const inside = (x) => x >= min && x <= max;
    ctx.save();
    ctx.lineWidth = ratio;
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    data.marks.forEach((mark, i) => {
      if (!inside(chart.marks[i])) return;
      const left = plot.valToPos(chart.marks[i], "x", true);
      ctx.strokeStyle = colour({ fault: "lost", spike: "data" }[mark.kind] || "start");
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
    });
    ctx.fillStyle = colour("bad");
    for (const series of chart.series) series.y.forEach((y, i) => {
      if (y !== null || !inside(series.xs[i]) || view.hidden.has(series.name)) return;
      const left = plot.valToPos(series.xs[i], "x", true), low = bbox.top + bbox.height, side = 5 * ratio;
      ctx.beginPath();
      ctx.moveTo(left - side, low);
      ctx.lineTo(left + side, low);
      ctx.lineTo(left, low - 1.6 * side);
      ctx.fill();
    });
    ctx.restore();
    if (chart.flags) place(chart);
  }

  // Shows the values at the cursor beside it.
  function tell(chart, plot) {
    const { tip } = chart, { left } = plot.cursor;
    if (!tip) return;
    tip.hidden = !(chart.active && left >= 0);
    if (tip.hidden) return;
    const at = plot.posToVal(left, "x");
    const rows = chart.series.filter((series) => series.xs.length && !view.hidden.has(series.name)).map((series) => {
      const i = nearest(series.xs, at);
      return { series, x: series.xs[i], i };
    });
    if (!rows.length) { tip.hidden = true; return; }
    const middle = rows.reduce((a, b) => Math.abs(b.x - at) < Math.abs(a.x - at) ? b : a).x;
    const apart = 0.01 * (plot.scales.x.max - plot.scales.x.min);
    const head = document.createElement("b");
    head.textContent = `${view.axis} ${timed() ? short(middle) : Math.round(middle).toLocaleString("en")}`;
    tip.replaceChildren(head, ...rows.slice(0, 16).map(({ series, x, i }) => {
      const row = document.createElement("span"), swatch = document.createElement("i");
      swatch.style.background = `var(--${series.colour})`;
      const { y } = series;
      let text = ` ${series.name} ${y[i] === null ? "not finite" : short(y[i])}`;
      if (series.shown) text += ` (smoothed ${short(series.shown[1][nearest(series.shown[0], x)] ?? NaN)})`;
      if (Math.abs(x - middle) > (series.dots ? 0 : apart)) text += ` at ${short(x)}`;
      row.append(swatch, text);
      return row;
    }));
    const right = left > plot.over.clientWidth / 2;
    tip.style.left = right ? "auto" : `${left + 12}px`;
    tip.style.right = right ? `${plot.over.clientWidth - left + 12}px` : "auto";
  }

  function zoom(range) {
    if (range) {
      const width = Math.min(Math.max(range[1] - range[0], (whole[1] - whole[0]) * 1e-5), whole[1] - whole[0]);
      const low = Math.min(Math.max(range[0], whole[0]), whole[1] - width);
      range = width >= whole[1] - whole[0] ? null : [low, low + width];
    }
    view.zoom = range;
    for (const { plot } of charts) {
      const [min, max] = view.zoom || whole;
      plot.setScale("x", { min, max });
    }
    tools();
  }

  // A chart with the focus answers to arrows, Home and End, plus and minus, 0 and Escape.
  function onKey(chart, event) {
    const { plot } = chart, [low, high] = view.zoom || whole;
    const xs = [...new Set(chart.series.filter((s) => !view.hidden.has(s.name)).flatMap((s) => s.xs))]
      .filter((x) => x >= low && x <= high).sort((a, b) => a - b);
    if (!xs.length || event.ctrlKey || event.altKey || event.metaKey) return;
    const now = plot.cursor.left >= 0 ? nearest(xs, plot.posToVal(plot.cursor.left, "x")) : -1;
    const step = event.shiftKey ? Math.max(1, Math.round(xs.length / 20)) : 1;
    const to = { ArrowRight: now + step, ArrowLeft: now < 0 ? xs.length - 1 : now - step, Home: 0, End: xs.length - 1 }[event.key];
    const middle = now < 0 ? (low + high) / 2 : xs[now];
    if (to !== undefined) {
      const left = plot.valToPos(xs[Math.min(Math.max(to, 0), xs.length - 1)], "x");
      plot.setCursor({ left, top: 1 }, true, true);
    } else if (event.key === "+" || event.key === "=") zoom([middle - (middle - low) / 2, middle + (high - middle) / 2]);
    else if (event.key === "-") zoom([middle - (middle - low) * 2, middle + (high - middle) * 2]);
    else if (event.key === "0" || event.key === "Escape") zoom(null);
    else return;
    event.preventDefault();
  }

  function legend(chart, keys) {
    keys.replaceChildren(...(chart.series.length < 2 ? [] : chart.series).map((series) => {
      const key = document.createElement("button"), line = document.createElement("i");
      key.type = "button";
      key.className = "key";
      key.setAttribute("aria-pressed", String(!view.hidden.has(series.name)));
      line.style.borderTopColor = `var(--${series.colour})`;
      if (series.dash.length) line.style.borderTopStyle = "dashed";
      key.append(line, series.name);
      key.onclick = () => {
        if (!view.hidden.delete(series.name)) view.hidden.add(series.name);
        for (const other of charts) {
          legend(other, other.figure.querySelector(".keys"));
          plotted(other);
        }
      };
      return key;
    }));
  }

  function tools() {
    const [low, high] = view.zoom || whole;
    const typed = (x) => timed() || high - low < 10 ? +x.toPrecision(6) : Math.round(x);
    byId("zoom-from").value = typed(low);
    byId("zoom-to").value = typed(high);
    byId("zoom-out").disabled = !view.zoom;
    byId("smoothing").value = view.level;
    byId("smoothing-width").textContent = view.level ? `${100 * LEVELS[view.level]} %` : "off";
    byId("x-axis").value = view.axis;
  }

  // The range of x holds all curves of all panels.
  function measure() {
    let low = Infinity, high = -Infinity;
    for (const chart of charts) {
      for (const series of chart.series) {
        series.xs = converted(series.run, series.x);
        if (series.means) series.meanXs = converted(series.run, series.means.x);
        if (series.xs.length) {
          low = Math.min(low, series.xs[0]);
          high = Math.max(high, series.xs[series.xs.length - 1]);
        }
      }
      chart.marks = converted(0, data.marks.map((mark) => mark.x));
    }
    const margin = low < high ? 0.01 * (high - low) : 1;
    whole = low <= high ? [low >= 0 ? Math.max(0, low - margin) : low - margin, high + margin] : [0, 1];
    if (view.zoom && (view.zoom[0] >= whole[1] || view.zoom[1] <= whole[0])) view.zoom = null;
  }

  function redraw() {
    charts.forEach(plotted);
    tools();
  }

  function build() {
    const block = byId("curves");
    charts.forEach((chart) => { chart.plot.destroy(); chart.resized.disconnect(); });
    charts = [];
    if (!block) return;
    data = JSON.parse(block.textContent);
    data.marks.sort((a, b) => a.x - b.x);
    if (view.level === null) view.level = block.dataset.long ? 3 : 0;
    charts = [...document.querySelectorAll("figure[data-panel]")].map((figure) => {
      const panel = data.panels[Number(figure.dataset.panel)];
      return { figure, title: panel.title, smooth: panel.smooth, series: panel.series, box: figure.querySelector(".plot"),
        log: view.log.has(panel.title), active: false };
    });
    measure();
    for (const chart of charts) {
      const { figure, box } = chart, log = figure.querySelector("input");
      const canLog = chart.series.some((series) => series.y.some((y) => y > 0));
      log.checked = chart.log;
      log.disabled = !canLog;
      log.onchange = () => {
        chart.log = log.checked;
        if (chart.log) view.log.add(chart.title); else view.log.delete(chart.title);
        plotted(chart);
      };
      legend(chart, figure.querySelector(".keys"));
      box.onkeydown = (event) => onKey(chart, event);
      box.onfocus = () => { chart.active = true; chart.tip.setAttribute("role", "status"); };
      box.onblur = () => { chart.active = box.matches(":hover"); chart.tip.hidden = true; };
      box.onpointerenter = () => { chart.active = true; };
      box.onpointerleave = () => { chart.active = document.activeElement === box; tell(chart, chart.plot); };
      chart.resized = new ResizeObserver(() => {
        const width = box.clientWidth, height = box.clientHeight;
        if (chart.plot && width > 0 && (width !== chart.plot.width || height !== chart.plot.height)) chart.plot.setSize({ width, height });
      });
    }
    charts.forEach(plotted);
    charts.forEach((chart) => chart.resized.observe(chart.box));
    byId("smoothing").oninput = (event) => { view.level = Number(event.target.value); redraw(); };
    byId("x-axis").onchange = (event) => { view.axis = event.target.value; view.zoom = null; measure(); redraw(); };
    byId("zoom-out").onclick = () => zoom(null);
    const typed = () => {
      const range = [Number(byId("zoom-from").value), Number(byId("zoom-to").value)];
      if (range[0] < range[1]) zoom(range);
    };
    byId("zoom-from").onchange = typed;
    byId("zoom-to").onchange = typed;
    tools();
  }

  function copies() {
    for (const button of document.querySelectorAll("button[data-copy]")) button.onclick = async () => {
      const source = byId(button.dataset.copy);
      try {
        await navigator.clipboard.writeText(source.textContent);
        button.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(source);
        button.textContent = "selected: press Ctrl-C";
      }
      setTimeout(() => { button.textContent = "copy"; }, 3000);
    };
  }

  const recolour = () => charts.forEach(({ plot }) => plot.redraw(false));
  document.querySelector(".theme").addEventListener("change", recolour);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  matchMedia("print").addEventListener("change", recolour);
  const start = () => { build(); copies(); };
  start();
  return { start };
})();
