// Draws points with intervals, lines and fronts as SVG: kvkeep.chart, kvkeep.symbol.
"use strict";

(() => {
  const SERIES = 8; // colours, and shapes
  const SIZE = 4.5; // half of a mark's width, in pixels
  const BOTTOM = 40; // pixels below the area, for numbers and the axis's name
  const TOP = 10;
  const ZERO = 22; // pixels between 0 and the rest of a logarithmic axis
  const SHAPES = [
    "M-1 0A1 1 0 1 1 1 0A1 1 0 1 1 -1 0Z",
    "M-.9-.9H.9V.9H-.9Z",
    "M0-1.15L1.1.85H-1.1Z",
    "M0-1.25L1.25 0L0 1.25L-1.25 0Z",
    "M0 1.15L1.1-.85H-1.1Z",
    "M-.4-1.1H.4V-.4H1.1V.4H.4V1.1H-.4V.4H-1.1V-.4H-.4Z",
    "M-1.2-.7H1.2V.7H-1.2Z",
    "M-.7-1.2H.7V1.2H-.7Z",
  ];

  const svg = (name, attributes = {}, ...children) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  };

  const shape = (series, x, y) =>
    svg("path", {
      class: "mark",
      d: SHAPES[series % SERIES],
      transform: `translate(${x} ${y}) scale(${SIZE})`,
      "vector-effect": "non-scaling-stroke",
    });

  /** A mark of a series on its own, for legends and tables. */
  const symbol = (series, front) =>
    svg(
      "svg",
      {
        class: `series-${series % SERIES}${front ? " on-front" : ""}`,
        width: 14,
        height: 14,
        viewBox: "-7 -7 14 14",
        "aria-hidden": "true",
      },
      shape(series, 0, 0),
    );

  const short = (value) => {
    if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e6)) {
      return value.toExponential(0);
    }
    return Number(value.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 6 });
  };

  // -- axes -------------------------------------------------------------------------------------

  const steps = (low, high, most) => {
    const rough = (high - low) / Math.max(1, most);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    const first = Math.ceil(low / step - 1e-9);
    const last = Math.floor(high / step + 1e-9);
    return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
  };

  const decades = (low, high, most) => {
    const powers = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += 1) {
      powers.push(10 ** e);
    }
    const times = (some) =>
      powers.flatMap((p) => some.map((n) => n * p)).filter((t) => t >= low && t <= high);
    const found = [[1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]].map(times);
    if (found[0].length < 3) return steps(low, high, Math.min(5, most));
    const fitting = found.find((ticks) => ticks.length <= most);
    if (fitting) return fitting;
    const every = Math.ceil(found[3].length / most);
    return found[3].filter((_, i) => i % every === 0);
  };

  /** An axis from `from` to `to`, in pixels, for these values. */
  const axisOf = (kind, values, from, to, most) => {
    const span = to - from;
    if (kind === "share") {
      const at = (value) => from + value * span;
      return { at, ticks: [0, 0.2, 0.4, 0.6, 0.8, 1] };
    }
    const positive = values.filter((value) => value > 0);
    const zero = positive.length < values.length;
    let low = positive.length ? Math.min(...positive) : 1;
    let high = positive.length ? Math.max(...positive) : 1;
    const spare = Math.max(1.06, (high / low) ** 0.06);
    low /= spare;
    high *= spare;
    const start = zero ? from + Math.sign(span) * ZERO : from;
    const scale = (to - start) / Math.log(high / low);
    const at = (value) =>
      value > 0 ? Math.max(Math.min(start, to), Math.min(Math.max(start, to),
        start + Math.log(value / low) * scale)) : from;
    const ticks = decades(low, high, most);
    return { at, ticks: zero ? [0, ...ticks] : ticks };
  };

  // -- names ------------------------------------------------------------------------------------

  /** Where each name fits beside its point without covering another name or point. */
  const placed = (points, width, left, right, bottom) => {
    const taken = points.map(({ x, y }) => [x - 7, y - 7, x + 7, y + 7]);
    const free = (box, own) =>
      box[0] >= left && box[2] <= right && box[1] >= 0 && box[3] <= bottom &&
      taken.every((one, i) => i === own ||
        box[2] < one[0] || box[0] > one[2] || box[3] < one[1] || box[1] > one[3]);
    const order = points.map((_, i) => i).sort((a, b) => points[b].front - points[a].front);
    const names = [];
    for (const i of order) {
      const { x, y, name } = points[i];
      const wide = width(name);
      const spots = [
        ["start", x + 9, y],
        ["end", x - 9, y],
        ["middle", x, y - 13],
        ["middle", x, y + 14],
      ];
      for (const [anchor, at, middle] of spots) {
        const shift = { start: 0, end: wide, middle: wide / 2 }[anchor];
        const box = [at - shift, middle - 6, at - shift + wide, middle + 6];
        if (!free(box, i)) continue;
        taken.push(box);
        names.push({ name, anchor, x: at, y: middle });
        break;
      }
    }
    return names;
  };

  // -- the chart --------------------------------------------------------------------------------

  /** A chart in an element. `update` draws it anew; `mark` marks the point of a row. */
  const chart = (element, { say, onMark }) => {
    const root = svg("svg", { class: "chart", role: "group" });
    const detail = document.createElement("div");
    detail.className = "chart-detail dim";
    element.replaceChildren(root, detail);
    const measuring = document.createElement("canvas").getContext("2d");
    let drawn = null; // what `update` was given
    let points = []; // { row, element, x, y }
    let chosen = null; // the row whose point Tab reaches

    const explain = (row) => {
      detail.replaceChildren(...(row ? say(row) : ["Point at a mark, or use Tab and the arrow keys."]));
      detail.classList.toggle("dim", !row);
    };

    const mark = (row) => {
      for (const point of points) point.element.classList.toggle("marked", point.row === row);
      explain(points.some((point) => point.row === row) ? row : null);
    };

    const focused = () => points.find((point) => point.element === document.activeElement) || null;

    const reachable = (row) => {
      chosen = row;
      for (const one of points) one.element.setAttribute("tabindex", one.row === row ? 0 : -1);
    };

    const moved = (event, point) => {
      const across = [...points].sort((a, b) => a.x - b.x || a.y - b.y);
      const up = [...points].sort((a, b) => a.y - b.y || a.x - b.x);
      const beside = (order, by) => order[order.indexOf(point) + by];
      const to = {
        ArrowLeft: () => beside(across, -1),
        ArrowRight: () => beside(across, 1),
        ArrowUp: () => beside(up, -1),
        ArrowDown: () => beside(up, 1),
        Home: () => across[0],
        End: () => across[across.length - 1],
      }[event.key];
      if (!to || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      const next = to();
      if (!next) return;
      reachable(next.row);
      next.element.focus();
    };

    const addGrid = (x, y, left, width, bottom) => {
      for (const tick of y.ticks) {
        const at = y.at(tick);
        root.append(
          svg("line", { class: "grid", x1: left, x2: width, y1: at, y2: at }),
          svg("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, drawn.y.format(tick)),
        );
      }
      for (const tick of drawn.x.ticks || x.ticks) {
        const at = x.at(tick);
        root.append(
          svg("line", { class: "grid", x1: at, x2: at, y1: TOP, y2: bottom }),
          svg("text", { x: at, y: bottom + 16, "text-anchor": "middle" }, drawn.x.format(tick)),
        );
      }
      const middle = (left + width) / 2;
      const name = svg("text", { x: middle, y: bottom + 34, "text-anchor": "middle" }, drawn.x.label);
      root.append(name);
    };

    const addPoint = (one, x, y) => {
      const at = { x: x.at(one.x), y: y.at(one.y[0]) };
      const group = svg("g", {
        class: `point series-${one.series % SERIES}${one.front ? " on-front" : ""}`,
        role: "img",
        tabindex: -1,
        "aria-label": say(one.row).map((part) => part.textContent ?? part).join(""),
      });
      if (one.y.length > 1) {
        const [low, high] = [y.at(one.y[1]), y.at(one.y[2])];
        group.append(svg("line", { class: "interval", x1: at.x, x2: at.x, y1: low, y2: high }));
      }
      group.append(
        svg("circle", { class: "area", cx: at.x, cy: at.y, r: 12 }),
        svg("circle", { class: "ring", cx: at.x, cy: at.y, r: 9 }),
        shape(one.series, at.x, at.y),
      );
      const point = { row: one.row, element: group, ...at, name: one.name, front: one.front };
      group.addEventListener("pointerenter", () => onMark(one.row));
      group.addEventListener("pointerleave", () => onMark(focused() && focused().row));
      group.addEventListener("click", () => group.focus());
      group.addEventListener("focus", () => {
        reachable(one.row);
        onMark(one.row);
      });
      group.addEventListener("blur", () => onMark(null));
      group.addEventListener("keydown", (event) => moved(event, point));
      root.append(group);
      points.push(point);
    };

    const path = (line, x, y) => {
      const at = line.rows.map((one) => [x.at(one.x), y.at(one.y[0])]);
      const [first, ...others] = at;
      const parts = others.map(([across, down]) =>
        line.kind === "front" ? `H${across}V${down}` : `L${across} ${down}`);
      return svg("path", {
        class: `${line.kind} ${line.series === null ? "" : `series-${line.series % SERIES}`}`,
        d: `M${first.join(" ")}${parts.join("")}`,
      });
    };

    const draw = () => {
      if (!drawn) return;
      const width = Math.max(240, element.clientWidth);
      const height = Math.round(Math.max(300, Math.min(460, width * 0.62)));
      const bottom = height - BOTTOM;
      measuring.font = getComputedStyle(root).font;
      const ends = drawn.points.flatMap((one) => {
        // An interval that nearly reaches 0 does not stretch the axis.
        const low = one.y.length > 1 ? Math.max(one.y[1], one.y[0] / 10) : one.y[0];
        return one.y.length > 1 ? [one.y[0], low, one.y[2]] : one.y;
      });
      const rough = axisOf(drawn.y.scale, ends, bottom, TOP, 8);
      const widest = Math.max(...rough.ticks.map((t) => measuring.measureText(drawn.y.format(t)).width));
      const left = Math.ceil(widest) + 10;
      const y = rough;
      const margin = Math.min(36, width * 0.05);
      const across = drawn.points.map((one) => one.x);
      const x = axisOf("log", across, left + margin, width - margin, Math.floor(width / 70));
      const before = focused();
      root.replaceChildren();
      points = [];
      root.setAttribute("viewBox", `0 0 ${width} ${height}`);
      root.setAttribute("height", height);
      const count = drawn.points.length;
      root.setAttribute("aria-label", `${drawn.y.label} over ${drawn.x.label}: ${count} points`);
      if (!count) {
        root.append(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "Nothing to show."));
        return explain(null);
      }
      addGrid(x, y, left, width, bottom);
      for (const line of drawn.lines) root.append(path(line, x, y));
      for (const one of drawn.points) addPoint(one, x, y);
      const wide = (text) => measuring.measureText(text).width;
      for (const one of placed(points, wide, left, width, bottom + 6)) {
        const at = { class: "name", x: one.x, y: one.y + 4, "text-anchor": one.anchor };
        root.append(svg("text", { ...at, "aria-hidden": "true" }, one.name));
      }
      const same = (row) => points.find((point) => point.row === row);
      const first = [...points].sort((a, b) => a.x - b.x)[0];
      reachable((same(chosen) || first).row);
      if (before && same(before.row)) same(before.row).element.focus();
      else explain(null);
    };

    let known = 0; // the element's width
    new ResizeObserver(() => {
      if (element.clientWidth === known) return;
      known = element.clientWidth;
      draw();
    }).observe(element);

    /** `{ points, lines, x, y }`: points are `{ row, series, name, front, x, y }`, where `y` is a
     *  value or a value and its interval; an axis is `{ label, format, scale, ticks }`, and x has a
     *  logarithmic scale. */
    const update = (given) => {
      drawn = given;
      draw();
    };
    return { update, mark };
  };

  Object.assign(window.kvkeep, { chart, symbol, short });
})();
