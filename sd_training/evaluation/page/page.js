"use strict";
(() => {
  const { runs, charts } = JSON.parse(document.getElementById("data").textContent);
  const controls = document.querySelector(".controls");
  const plots = new Map();

  const digits = (value) => String(+value.toPrecision(4));
  const isHuge = (value) => Math.abs(value) >= 1e9;
  const shown = (value) => {
    if (value == null) return "–";
    if (isHuge(value)) return value.toExponential(3);
    return Math.abs(value) >= 1e5 ? (+value.toPrecision(6)).toLocaleString("en") : digits(value);
  };
  const tick = (value) => {
    const size = Math.abs(value ?? 0);
    if (value == null || size === 0) return value == null ? "" : "0";
    if (isHuge(value) || size < 1e-3) return (+value.toPrecision(3)).toExponential();
    return size >= 1e6 ? `${digits(value / 1e6)}M` : size >= 1e4 ? `${digits(value / 1e3)}k` : digits(value);
  };
  const translucent = (colour, alpha) => `color-mix(in srgb, ${colour} ${100 * alpha}%, transparent)`;

  // Exponential average whose first values are not drawn towards zero.
  const smoothed = (values, weight) => {
    let sum = 0, norm = 0;
    return values.map((value) => {
      if (value == null) return null;
      sum = weight * sum + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return sum / norm;
    });
  };

  // uPlot's data and series of a chart; a curve with an interval has two invisible ones and a band between them.
  const curves = (chart, weight, isLog, scale) => {
    const tables = [], series = [{}], bands = [];
    const positive = (values) => (isLog ? values.map((value) => (value > 0 ? value : null)) : values);
    const add = (own, values, options) => {
      tables.push([own.x.map((x) => x * scale(own.run)), positive(values)]);
      series.push({ spanGaps: false, points: { show: chart.part !== "training" && own.x.length < 40, size: 5, fill: own.dashed ? "#fff" : own.colour }, value: (_, value) => shown(value), ...options });
    };
    if (chart.stacked) {
      const sums = chart.series[0].x.map(() => 0);
      const cumulated = chart.series.map((own) => own.x.map((_, i) => (sums[i] += own.y[i] ?? 0)));
      // The highest first: each area is drawn over the lower part of the one before it.
      chart.series.map((own, i) => [own, cumulated[i]]).reverse().forEach(([own, values]) =>
        add(own, values, { label: own.label.replace("_", " "), stroke: own.colour, fill: own.colour, width: 1, points: { show: false }, value: (_u, _v, _s, i) => shown(i == null ? null : own.y[i]) }));
      return { tables, series, bands };
    }
    for (const own of chart.series) {
      const isSmooth = chart.smooth && weight > 0 && own.x.length > 2;
      const line = { label: own.label, stroke: own.colour, width: 2, dash: own.dashed ? [6, 4] : undefined };
      if (isSmooth) add(own, own.y, { label: "", stroke: translucent(own.colour, 0.25), width: 1, points: { show: false } });
      add(own, isSmooth ? smoothed(own.y, weight) : own.y, isSmooth ? { ...line, points: { show: false } } : line);
      if (own.high) {
        for (const end of ["high", "low"]) add(own, own[end], { label: "", width: 0, stroke: "transparent", points: { show: false } });
        bands.push({ series: [series.length - 2, series.length - 1], fill: translucent(own.colour, 0.16) });
      }
    }
    return { tables, series, bands };
  };

  // Vertical lines where a run was resumed, and short ones where it had an incident.
  const marks = (chart, scale) => (plot) => {
    if (chart.x) return;
    const { ctx, bbox } = plot;
    const line = (x, top, colour, dash) => {
      const left = plot.valToPos(x, "x", true);
      if (left < bbox.left || left > bbox.left + bbox.width) return;
      ctx.strokeStyle = colour;
      ctx.setLineDash(dash);
      ctx.beginPath();
      ctx.moveTo(left, top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
    };
    ctx.save();
    ctx.lineWidth = 1.5 * devicePixelRatio;
    for (const run of new Set(chart.series.map((own) => own.run))) {
      const grey = runs.length > 1 ? translucent(runs[run].colour, 0.6) : "#8a97a5";
      runs[run].resumes.forEach((x) => line(x * scale(run), bbox.top, grey, [5 * devicePixelRatio, 4 * devicePixelRatio]));
      runs[run].incidents.forEach((x) => line(x * scale(run), bbox.top + 0.9 * bbox.height, "#d1495b", []));
    }
    ctx.restore();
  };

  // The interval of each measurement, also of a single one, which has no band.
  const whiskers = (chart, scale) => (plot) => {
    const { ctx } = plot;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    for (const own of chart.series.filter((one) => one.high && one.x.length < 40)) {
      ctx.strokeStyle = own.colour;
      ctx.setLineDash(own.dashed ? [3 * devicePixelRatio, 2 * devicePixelRatio] : []);
      own.x.forEach((x, i) => {
        if (own.low[i] == null || own.high[i] == null) return;
        const left = plot.valToPos(x * scale(own.run), "x", true);
        if (left < plot.bbox.left - 1 || left > plot.bbox.left + plot.bbox.width + 1) return;
        ctx.beginPath();
        for (const end of ["low", "high"]) ctx[end === "low" ? "moveTo" : "lineTo"](left, plot.valToPos(own[end][i], "y", true));
        ctx.stroke();
      });
    }
    ctx.restore();
  };

  // Of a logarithmic axis, to one digit: uPlot's own goes to whole decades.
  const range = (_, low, high) => {
    const digit = (value) => 10 ** Math.floor(Math.log10(value));
    return [Math.floor(low / digit(low)) * digit(low), Math.ceil(high / digit(high)) * digit(high)];
  };

  const draw = (figure) => {
    const chart = charts[figure.dataset.chart];
    const inImages = controls.x.value === "images" && !controls.x.disabled;
    const scale = (run) => (!chart.x && inImages ? runs[run].images_per_step : 1);
    const values = chart.series.flatMap((own) => own.y).filter((value) => value > 0);
    const isLog = chart.log && controls.log.checked && Math.max(...values) > 4 * Math.min(...values);
    const { tables, series, bands } = curves(chart, +controls.smoothing.value, isLog, scale);
    const name = chart.x ? chart.x : inImages ? "images seen" : "optimizer step";
    const axis = { stroke: "#5d6b7a", grid: { stroke: "#e8ecf1", width: 1 }, ticks: { stroke: "#dde3ea", width: 1, size: 5 }, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif" };
    const size = () => ({ width: figure.clientWidth - 24, height: chart.stacked ? 300 : 230 });
    plots.get(figure)?.destroy();
    const plot = new uPlot({
      ...size(),
      series: [{ label: name, value: (_, value) => (value == null ? "–" : value.toLocaleString("en")) }, ...series.slice(1)],
      bands,
      scales: { x: { time: false }, y: isLog ? { distr: 3, range } : chart.stacked ? { range: (_, _low, high) => [0, 1.03 * high] } : {} },
      axes: [
        { ...axis, label: name, labelSize: 18, size: 34, values: (_, ticks) => ticks.map(tick) },
        { ...axis, size: 58, values: (_, ticks) => ticks.map(tick) },
      ],
      cursor: { sync: { key: chart.x ?? "step", scales: ["x", null] }, points: { size: 7 } },
      hooks: { draw: [marks(chart, scale), whiskers(chart, scale)] },
    }, uPlot.join(tables), figure);
    plot.root.querySelectorAll(".u-series").forEach((row, i) => { row.hidden = i > 0 && !series[i].label; });
    plot.resize = () => plot.setSize(size());
    plots.set(figure, plot);
  };

  const figures = [...document.querySelectorAll("figure[data-chart]")];
  if (controls) {
    const redraw = () => {
      controls.querySelector("output").value = (+controls.smoothing.value).toFixed(2);
      figures.forEach(draw);
    };
    controls.x.disabled = !runs.every((run) => run.images_per_step);
    controls.addEventListener("input", redraw);
    controls.addEventListener("submit", (event) => event.preventDefault());
    redraw();
    addEventListener("resize", () => plots.forEach((plot) => plot.resize()));
  }

  // A slider shows of each strip the newest picture up to its step.
  for (const box of document.querySelectorAll(".pictures")) {
    const slider = box.querySelector("[type=range]");
    if (!slider) continue;
    const steps = slider.dataset.steps.split(" ").map(Number);
    const show = () => {
      box.querySelector("output").value = steps[slider.value].toLocaleString("en");
      for (const strip of box.querySelectorAll("figure")) {
        const images = [...strip.querySelectorAll("img")];
        const newest = images.filter((image) => image.dataset.step <= steps[slider.value]).pop() ?? images[0];
        images.forEach((image) => { image.hidden = image !== newest; });
        const lines = (newest?.dataset.captions ?? "").trimEnd().split("\n");
        strip.querySelector(".captions")?.replaceChildren(...lines.map((line) => Object.assign(document.createElement("li"), { textContent: line })));
        strip.querySelector("figcaption small").textContent = newest ? `step ${(+newest.dataset.step).toLocaleString("en")}` : "";
      }
    };
    slider.addEventListener("input", show);
    show();
  }
})();
