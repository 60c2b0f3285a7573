// The page of an evaluation: charts, their controls, and a table (see evaluation.py for the data).
"use strict";

(() => {
  const { chart, symbol, short, make, number, percent } = window.kvkeep;
  const data = JSON.parse(document.getElementById("data").textContent);
  const { rows, measures } = data;
  const byKey = new Map(measures.map((measure) => [measure.key, measure]));
  const unique = (values) => [...new Set(values)];
  const series = unique(rows.map((row) => row.series));
  const hidden = new Set(); // series
  const $ = (id) => document.getElementById(id);

  const mebibytes = (row) => row.bytes / 2 ** 20;
  const shareOf = (row) => row.bytes / row.full_bytes;

  const AXES = [
    { name: "MiB held", label: "MiB held", of: mebibytes, format: short },
    { name: "share of the full cache", label: "bytes held, of the full cache's", of: shareOf, format: percent },
  ];
  const contexts = unique(rows.map((row) => row.context));
  if (contexts.length > 1) {
    AXES.push({ name: "context", label: "context, tokens", of: (row) => row.context, format: short, ticks: contexts });
  }
  let axis = AXES[0];
  let sort = null; // { column, up }
  let marked = null;

  // -- what is shown ----------------------------------------------------------------------------

  const valueOf = (row, key) => (row.figures[key] ? row.figures[key][0] : null);

  /** The rows of a group that no other beats: none holds fewer bytes and has a better figure. */
  const frontOf = (shown, measure) => {
    const better = (a, b) => (measure.best === "low" ? a < b : a > b);
    const fronts = new Map();
    const known = shown.filter((row) => row.figures[measure.key]);
    known.sort((a, b) => {
      if (a.bytes !== b.bytes) return a.bytes - b.bytes;
      return better(valueOf(a, measure.key), valueOf(b, measure.key)) ? -1 : 1;
    });
    for (const row of known) {
      const front = fronts.get(row.group) || [];
      const last = front[front.length - 1];
      if (!last || better(valueOf(row, measure.key), valueOf(last, measure.key))) front.push(row);
      fronts.set(row.group, front);
    }
    return [...fronts.values()];
  };

  const chosenMeasures = () => [0, 1].map((i) => byKey.get($(`measure-${i}`).value));

  const shownRows = () => {
    const wanted = $("search").value.trim().toLowerCase();
    let shown = rows.filter((row) =>
      !hidden.has(row.series) && row.spec.toLowerCase().includes(wanted));
    if ($("best").checked) {
      const fronts = new Set(chosenMeasures().flatMap((one) => frontOf(shown, one).flat()));
      shown = shown.filter((row) => fronts.has(row));
    }
    return shown;
  };

  const interval = (figure, show) =>
    figure.length > 1 ? ` (95 %: ${show(figure[1])} to ${show(figure[2])})` : "";

  const say = (row) => {
    const told = measures.flatMap(({ key, heading }) => {
      const figure = row.figures[key];
      return figure ? [`${heading} ${number(figure[0])}${interval(figure, number)}`] : [];
    });
    const held = `${number(mebibytes(row))} MiB, ${percent(shareOf(row))} of the full cache`;
    return [make("b", "", row.spec), ` ${row.series}: ${held}. ${told.join("; ")}.`];
  };

  // -- charts -----------------------------------------------------------------------------------

  const mark = (row) => {
    marked = row;
    for (const one of charts) one.mark(row);
    for (const [line, of] of lines) line.classList.toggle("marked", of === row);
  };

  const charts = [0, 1].map((i) => chart($(`chart-${i}`), { say, onMark: mark }));
  const lines = new Map(); // of the table -> row

  const linesBetween = (points, fronts) => {
    const over = axis.name === "context";
    const groups = new Map();
    for (const point of points) {
      const { row } = point;
      const key = over ? `${row.model} ${row.spec}` : `${row.series} ${row.family}`;
      groups.set(key, [...(groups.get(key) || []), point]);
    }
    const families = [...groups.values()].filter((some) => some.length > 1).map((some) => ({
      kind: "family",
      series: new Set(some.map((point) => point.series)).size > 1 ? null : some[0].series,
      rows: [...some].sort((a, b) => a.x - b.x),
    }));
    if (over) return families;
    const pointOf = new Map(points.map((point) => [point.row, point]));
    return families.concat(fronts.filter((front) => front.length > 1).map((front) => ({
      kind: "front",
      series: series.indexOf(front[0].group),
      rows: front.map((row) => pointOf.get(row)),
    })));
  };

  const drawChart = (i, shown) => {
    const measure = chosenMeasures()[i];
    const fronts = frontOf(shown, measure);
    const best = new Set(fronts.flat());
    const points = shown.filter((row) => row.figures[measure.key]).map((row) => ({
      row,
      series: series.indexOf(row.series),
      name: row.name,
      front: best.has(row),
      x: axis.of(row),
      y: row.figures[measure.key],
    }));
    charts[i].update({
      points,
      lines: linesBetween(points, fronts),
      x: axis,
      y: { label: measure.label, scale: measure.scale, format: measure.scale === "share" ? percent : short },
    });
  };

  // -- the table --------------------------------------------------------------------------------

  const columns = [
    { heading: "spec", of: (row) => row.spec },
    ...(unique(rows.map((row) => row.model)).length > 1
      ? [{ heading: "model", of: (row) => row.model.replace(/,$/, "") }] : []),
    { heading: "context", of: (row) => row.context },
    { heading: "MiB", of: mebibytes },
    { heading: "of full", of: shareOf, show: percent },
    ...measures.map(({ key, heading }) => ({ heading, key, of: (row) => valueOf(row, key) })),
  ];

  const cell = (column, row) => {
    const value = column.of(row);
    if (typeof value === "string") return make("td", "", value);
    const td = make("td", "number", value === null ? "–" : (column.show || number)(value));
    const figure = column.key && row.figures[column.key];
    if (figure && figure.length > 1) {
      td.append(" ", make("small", "", `${number(figure[1])}–${number(figure[2])}`));
    }
    return td;
  };

  const compared = (a, b) => {
    const [x, y] = [a, b].map(sort.column.of);
    if (x === null || y === null) return (x === null) - (y === null);
    const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
    return sort.up ? order : -order;
  };

  const body = make("tbody");

  const drawTable = (shown) => {
    const front = new Set(frontOf(shown, chosenMeasures()[0]).flat());
    lines.clear();
    const ordered = sort ? [...shown].sort(compared) : shown;
    body.replaceChildren(...ordered.map((row) => {
      const line = make("tr");
      const name = make("th", "", row.spec);
      name.scope = "row";
      name.prepend(symbol(series.indexOf(row.series), front.has(row)));
      if (front.has(row)) name.append(make("span", "visually-hidden", ", on the front"));
      line.append(name, ...columns.slice(1).map((column) => cell(column, row)));
      line.addEventListener("pointerenter", () => mark(row));
      line.addEventListener("pointerleave", () => mark(null));
      lines.set(line, row);
      return line;
    }));
  };

  const buildTable = () => {
    const head = make("tr");
    for (const column of columns) {
      const th = make("th", column === columns[0] ? "" : "number");
      th.scope = "col";
      const button = make("button", "", column.heading);
      button.type = "button";
      button.addEventListener("click", () => {
        sort = { column, up: !(sort && sort.column === column && sort.up) };
        for (const other of head.children) other.removeAttribute("aria-sort");
        const way = sort.up ? "ascending" : "descending";
        th.setAttribute("aria-sort", way);
        $("sorted").textContent = `Sorted by ${column.heading}, ${way}.`;
        drawTable(shownRows());
      });
      th.append(button);
      head.append(th);
    }
    const top = make("thead");
    top.append(head);
    $("table").append(top, body);
  };

  // -- controls ---------------------------------------------------------------------------------

  const draw = () => {
    const shown = shownRows();
    drawTable(shown);
    for (const i of [0, 1]) drawChart(i, shown);
    $("joined").textContent = axis.name === "context" ? "their context" : "their budget";
    mark(shown.includes(marked) ? marked : null);
  };

  const buildControls = () => {
    for (const one of AXES) {
      const label = make("label");
      const input = make("input");
      input.type = "radio";
      input.name = "across";
      input.checked = one === axis;
      input.addEventListener("change", () => {
        axis = one;
        draw();
      });
      label.append(input, ` ${one.name}`);
      $("across").append(label);
    }
    series.forEach((name, index) => {
      const button = make("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      button.append(symbol(index, true), name);
      button.addEventListener("click", () => {
        if (!hidden.delete(name)) hidden.add(name);
        button.setAttribute("aria-pressed", String(!hidden.has(name)));
        draw();
      });
      $("legend").append(button);
    });
    $("legend").hidden = series.length < 2;
    [0, 1].forEach((i) => {
      const select = $(`measure-${i}`);
      for (const { key, label } of measures) {
        const option = make("option", "", label);
        option.value = key;
        select.append(option);
      }
      select.value = data.shown[i];
      select.addEventListener("change", draw);
    });
    $("search").addEventListener("input", draw);
    $("best").addEventListener("change", draw);
    $("controls").addEventListener("submit", (event) => event.preventDefault());
  };

  const buildRuns = () => {
    for (const { title, settings } of data.runs) {
      $("runs").append(make("h3", "", title));
      const list = make("dl", "figures");
      for (const [name, value] of settings) {
        const item = make("div");
        item.append(make("dt", "", name), make("dd", "", value));
        list.append(item);
      }
      $("runs").append(list);
    }
  };

  $("title").textContent = data.title;
  $("above").hidden = !rows.some((row) => shareOf(row) > 1);
  buildTable();
  buildControls();
  buildRuns();
  draw();
})();
