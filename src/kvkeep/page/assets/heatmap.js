// Draws a picture of a cache (see picture.py) into an element: kvkeep.heatmap, kvkeep.summary.
"use strict";

(() => {
  const { make, number, percent } = window.kvkeep;
  const ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  const CODES = new Map([...ALPHABET].map((character, code) => [character, code]));
  const FULL = 15; // the largest share of a column's tokens
  const SHARED = 1; // bits of a cell
  const ENCODED = 2;
  const GUTTER = 34; // pixels left of the map, for the numbers of layers
  const AXIS = 18; // pixels below it, for positions
  const WIDEST = 12; // pixels of a column
  const KINDS = [
    ["kept", FULL * 4],
    ["kept, encoded", FULL * 4 + ENCODED],
    ["shared", FULL * 4 + SHARED],
    ["shared, encoded", FULL * 4 + SHARED + ENCODED],
    ["evicted", 0],
  ];

  const bytes = (value) => {
    const units = ["B", "KB", "MB", "GB", "TB"];
    let unit = 0;
    while (value >= 1000 && unit < units.length - 1) {
      value /= 1000;
      unit += 1;
    }
    return `${unit && value < 100 ? value.toPrecision(3) : Math.round(value)} ${units[unit]}`;
  };

  // -- colours ----------------------------------------------------------------------------------

  const channels = (style, name) => {
    const text = style.getPropertyValue(name).trim();
    return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  };

  const mixed = (from, to, share) => from.map((value, i) => value + (to[i] - value) * share);

  const packed = ([red, green, blue]) =>
    ((255 << 24) | (Math.round(blue) << 16) | (Math.round(green) << 8) | Math.round(red)) >>> 0;

  /** The colours of each cell's code: of the cell, and of the lines across an encoded one. */
  const palette = (style) => {
    const evicted = channels(style, "--map-evicted");
    const grid = channels(style, "--map-grid");
    const kinds = ["--map-own", "--map-shared", "--map-own-encoded", "--map-shared-encoded"];
    const full = kinds.map((name) => channels(style, name));
    const plain = new Uint32Array(64);
    const lines = new Uint32Array(64);
    for (let code = 0; code < 64; code += 1) {
      const share = (code >> 2) / FULL;
      const colour = mixed(evicted, full[code & 3], share);
      plain[code] = packed(colour);
      lines[code] = code & ENCODED ? packed(mixed(colour, grid, 0.5 * share)) : plain[code];
    }
    return { plain, lines, grid: packed(grid) };
  };

  /** Fill a part of a pixel buffer with a cell. */
  const paint = (pixels, width, box, code, colours) => {
    const period = 5;
    for (let y = box.top; y < box.bottom; y += 1) {
      for (let x = box.left; x < box.right; x += 1) {
        const across = code & ENCODED && (x + y) % period === 0;
        pixels[y * width + x] = (across ? colours.lines : colours.plain)[code];
      }
    }
  };

  const swatch = (code) => {
    const canvas = make("canvas");
    canvas.width = 36;
    canvas.height = 24;
    canvas.setAttribute("aria-hidden", "true");
    const draw = (colours) => {
      const image = new ImageData(36, 24);
      const box = { left: 0, top: 0, right: 36, bottom: 24 };
      paint(new Uint32Array(image.data.buffer), 36, box, code, colours);
      canvas.getContext("2d").putImageData(image, 0, 0);
    };
    return { canvas, draw };
  };

  // -- what a picture says ----------------------------------------------------------------------

  /** The lines of a map: one for each head, or one for a layer whose heads keep the same. */
  const linesOf = (picture) => {
    const lines = [];
    picture.layers.forEach((layer, index) => {
      layer.cells.forEach((cells, head) => {
        lines.push({
          layer: index, // among those that attend
          place: layer.place, // among all of the model
          head: layer.cells.length === 1 && layer.heads > 1 ? null : head,
          heads: layer.heads / layer.cells.length, // how many it stands for
          spec: layer.spec,
          kept: layer.kept[head],
          codes: Uint8Array.from(cells, (character) => CODES.get(character) ?? 0),
        });
      });
    });
    return lines;
  };

  const howHeld = (code, size) => {
    const share = code >> 2;
    if (!share) return "evicted";
    const count = Math.min(Math.max(1, Math.round((share * size) / FULL)), size);
    const about = size > FULL && share < FULL ? "about " : "";
    const kept = size === 1 ? "kept" : `${about}${number(count)} of ${number(size)} kept`;
    return [kept, code & SHARED && "shared", code & ENCODED && "encoded"].filter(Boolean).join(", ");
  };

  const columnName = (picture, column) => {
    const first = column * picture.group;
    const last = Math.min(first + picture.group, picture.tokens) - 1;
    return first === last ? `token ${number(first)}` : `tokens ${number(first)} to ${number(last)}`;
  };

  const columnSize = (picture, column) =>
    Math.min(picture.group, picture.tokens - column * picture.group);

  /** Cells for fewer columns: each shows the mean share of those that it stands for, and how most
   * of what they keep is held. */
  const condensed = (codes, columns) =>
    Uint8Array.from({ length: columns }, (_, i) => {
      const first = Math.floor((i * codes.length) / columns);
      const last = Math.max(first + 1, Math.floor(((i + 1) * codes.length) / columns));
      let all = 0;
      const of = [0, 0, 0, 0]; // by the bits of a cell
      for (let at = first; at < last; at += 1) {
        all += codes[at] >> 2;
        of[codes[at] & 3] += codes[at] >> 2;
      }
      if (!all) return 0;
      // Only the largest share means all, as in the picture.
      const mean = Math.min(FULL - 1, Math.max(1, Math.round(all / (last - first))));
      const share = all === FULL * (last - first) ? FULL : mean;
      return (share << 2) | of.indexOf(Math.max(...of));
    });

  /** For each column, the share of all heads that keep its tokens, 0 to 1. */
  const sharesOf = (lines, columns) => {
    const shares = new Float32Array(columns);
    let heads = 0;
    for (const line of lines) {
      heads += line.heads;
      for (let i = 0; i < columns; i += 1) shares[i] += ((line.codes[i] >> 2) / FULL) * line.heads;
    }
    return shares.map((share) => (heads ? share / heads : 0));
  };

  /** All that is kept, over all heads of all layers, in tokens per head. */
  const keptOf = (picture) => {
    let kept = 0;
    let heads = 0;
    for (const layer of picture.layers) {
      const each = layer.heads / layer.kept.length;
      for (const count of layer.kept) kept += count * each;
      heads += layer.heads;
    }
    return heads ? kept / heads : 0;
  };

  // -- the summary: bars and figures ------------------------------------------------------------

  const barRow = (name, of) => {
    const row = make("div", "bar-row");
    const line = make("p");
    const value = make("span", "dim");
    line.append(make("span", "", name), value);
    const bar = make("div", "bar");
    bar.setAttribute("role", "img");
    const fill = make("span", of);
    bar.append(fill);
    row.append(line, bar);
    const update = (part, whole, text) => {
      value.textContent = text;
      fill.style.width = whole ? `${Math.min(100, (100 * part) / whole)}%` : "0";
      bar.setAttribute("aria-label", `${name}: ${text}`);
    };
    return { row, update };
  };

  /** The bytes, tokens and slots of a picture. Returns an object with `update(picture)`. */
  const summary = (element) => {
    const held = barRow("Memory held", "");
    const found = barRow("Prompt found, not computed", "shared");
    element.replaceChildren(held.row, found.row);
    const update = (picture) => {
      const { live_bytes: live, full_bytes: full } = picture;
      const more = `, ${bytes(live - full)} more than a full cache, for the policy's scores`;
      const less = ` of ${bytes(full)} for a full cache (${percent(live, full)})`;
      held.update(live, full, bytes(live) + (live > full ? more : less));
      const text = `${number(picture.found)} of ${number(picture.prompt)} tokens`;
      found.update(picture.found, picture.prompt, text);
    };
    const clear = () => {
      held.update(0, 0, "–");
      found.update(0, 0, "–");
    };
    clear();
    return { update, clear };
  };

  // -- the map ----------------------------------------------------------------------------------

  /** A heat map in an element. Returns an object with `update(picture, columns)` and `clear()`;
   *  `columns`, if given, are more than the picture has: those that will follow have room. */
  const heatmap = (element) => {
    const legend = make("ul", "map-legend");
    const swatches = KINDS.map(([name, code]) => {
      const { canvas, draw } = swatch(code);
      const item = make("li");
      item.append(canvas, make("span", "", name));
      legend.append(item);
      return draw;
    });
    const field = make("div", "map-field");
    field.tabIndex = 0;
    field.setAttribute("role", "application");
    field.setAttribute("aria-roledescription", "heat map");
    const canvas = make("canvas");
    const columnMark = make("div", "map-column");
    const rowMark = make("div", "map-row");
    columnMark.hidden = rowMark.hidden = true;
    field.append(canvas, columnMark, rowMark);
    const detail = make("output", "map-detail");
    detail.id = `map-detail-${document.querySelectorAll(".map-detail").length}`;
    field.setAttribute("aria-describedby", detail.id);
    detail.setAttribute("aria-live", "off"); // but while the map has the focus
    const say = (...parts) => {
      const said = parts.map((part) => part.textContent ?? part).join("");
      if (detail.textContent !== said) detail.replaceChildren(...parts);
    };
    const words = make("div", "map-text");
    words.tabIndex = 0;
    words.setAttribute("role", "region");
    words.setAttribute("aria-label", "The text; the darker a token, the more heads keep it");
    element.replaceChildren(legend, field, detail, words);

    const empty = { tokens: 0, prompt: 0, found: 0, group: 1, texts: [], layers: [] };
    let picture = empty;
    let lines = [];
    let shares = new Float32Array();
    let tops = []; // of each line, in pixels
    let room = 0; // columns that the map has room for
    let step = 0; // pixels of a column
    let cursor = null; // { line, column }
    let pointsAtWord = false; // and not at a cell

    const heightOf = () => {
      const heads = picture.layers.reduce((sum, layer) => sum + layer.heads, 0);
      return Math.max(2, Math.min(20, Math.floor(360 / Math.max(1, heads))));
    };

    const layOut = () => {
      const height = heightOf();
      tops = [];
      let top = 0;
      lines.forEach((line, index) => {
        if (index && line.layer !== lines[index - 1].layer) top += height > 2 ? 2 : 1;
        tops.push({ top, bottom: top + height * line.heads });
        top += height * line.heads;
      });
      return Math.max(top, 40);
    };

    const drawAxes = (context, width, bottom, style) => {
      context.font = `11px ${style.fontFamily}`;
      context.fillStyle = style.getPropertyValue("--dim");
      context.textBaseline = "middle";
      context.textAlign = "right";
      let free = -Infinity;
      picture.layers.forEach((layer, index) => {
        const own = lines.flatMap((line, i) => (line.layer === index ? [tops[i]] : []));
        const middle = (own[0].top + own[own.length - 1].bottom) / 2;
        if (middle - free < 12) return;
        context.fillText(String(layer.place), GUTTER - 8, middle);
        free = middle;
      });
      context.textBaseline = "top";
      context.textAlign = "left";
      const most = Math.max(1, Math.floor(width / 70)) + 1;
      const rough = Math.max(1, picture.tokens / most);
      const power = 10 ** Math.floor(Math.log10(rough));
      const tick = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) || rough;
      for (let at = 0; at < picture.tokens; at += tick) {
        const x = GUTTER + (at / picture.group) * step;
        const text = number(at);
        if (x + context.measureText(text).width > GUTTER + width) break;
        context.fillRect(x, bottom, 1, 4);
        context.fillText(text, x + 3, bottom + 3);
      }
      if (picture.prompt < picture.tokens) {
        const x = GUTTER + (picture.prompt / picture.group) * step;
        context.fillStyle = style.getPropertyValue("--ink");
        context.fillRect(x - 1, 0, 2, bottom + 4);
      }
    };

    const drawCells = (context, width, bottom, scale, colours) => {
      const across = Math.max(1, Math.round(Math.min(width, picture.texts.length * step) * scale));
      const columns = Math.min(picture.texts.length, across);
      const down = Math.round(bottom * scale);
      const image = new ImageData(across, down);
      const pixels = new Uint32Array(image.data.buffer).fill(colours.grid);
      const gap = across / columns >= 5 ? 1 : 0;
      const edges = Array.from({ length: columns + 1 }, (_, i) => Math.round((i * across) / columns));
      lines.forEach((line, index) => {
        const { top, bottom: end } = tops[index];
        const rowGap = (end - top) * scale >= 5 ? 1 : 0;
        const box = { top: Math.round(top * scale), bottom: Math.round(end * scale) - rowGap };
        const codes = condensed(line.codes, columns);
        for (let column = 0; column < columns; column += 1) {
          box.left = edges[column];
          box.right = edges[column + 1] - gap;
          paint(pixels, across, box, codes[column], colours);
        }
      });
      context.putImageData(image, Math.round(GUTTER * scale), 0);
    };

    const draw = () => {
      const style = getComputedStyle(element);
      const colours = palette(style);
      swatches.forEach((drawSwatch) => drawSwatch(colours));
      const scale = window.devicePixelRatio || 1;
      const whole = Math.floor(element.clientWidth) || 300;
      const width = Math.max(1, whole - GUTTER);
      const bottom = layOut();
      step = Math.min(WIDEST, width / Math.max(1, picture.texts.length, room));
      canvas.width = Math.round(whole * scale);
      canvas.height = Math.round((bottom + AXIS) * scale);
      canvas.style.width = `${whole}px`;
      canvas.style.height = `${bottom + AXIS}px`;
      const context = canvas.getContext("2d");
      context.setTransform(scale, 0, 0, scale, 0, 0);
      if (lines.length && picture.texts.length) {
        drawCells(context, width, bottom, scale, colours);
        drawAxes(context, width, bottom, style);
      } else {
        context.fillStyle = style.getPropertyValue("--map-evicted");
        context.fillRect(GUTTER, 0, width, bottom);
      }
      drawWords(style);
      drawCursor();
    };

    const drawWords = (style) => {
      const colour = channels(style, "--map-own").join(" ");
      const columns = picture.texts.length;
      while (words.children.length > columns) words.lastChild.remove();
      for (let i = 0; i < columns; i += 1) {
        const word = words.children[i] || words.appendChild(make("span"));
        if (word.textContent !== picture.texts[i]) word.textContent = picture.texts[i];
        word.dataset.column = String(i);
        word.style.backgroundColor = `rgb(${colour} / ${(0.5 * shares[i]).toFixed(2)})`;
        const begins = picture.prompt < picture.tokens;
        const border = begins && i === Math.floor(picture.prompt / picture.group);
        word.classList.toggle("answer-begins", border);
      }
      words.hidden = !columns || picture.texts.every((text) => !text);
    };

    const place = (mark, left, top, width, height) => {
      mark.style.transform = `translate(${left}px, ${top}px)`;
      mark.style.width = `${Math.max(1, width)}px`;
      mark.style.height = `${height}px`;
      mark.hidden = false;
    };

    const drawCursor = () => {
      columnMark.hidden = rowMark.hidden = true;
      for (const word of words.querySelectorAll(".shown")) word.classList.remove("shown");
      if (!cursor || !lines.length || !picture.texts.length) {
        const heads = picture.layers.reduce((sum, layer) => sum + layer.heads, 0);
        const all =
          `${number(Math.round(keptOf(picture)))} of ${number(picture.tokens)} tokens are kept, ` +
          `on average over ${picture.layers.length} layers and ${heads} heads.`;
        field.setAttribute("aria-label", lines.length ? `Cache. ${all}` : "Cache, empty");
        const how = "Point at a cell, or use the arrow keys, to see its token.";
        say(lines.length ? `${all} ${how}` : "The cache is empty.");
        detail.classList.add("dim");
        return;
      }
      cursor.line = Math.min(cursor.line, lines.length - 1);
      cursor.column = Math.min(cursor.column, picture.texts.length - 1);
      const line = lines[cursor.line];
      const { top, bottom } = tops[cursor.line];
      const left = GUTTER + cursor.column * step;
      place(columnMark, left, 0, step, tops[tops.length - 1].bottom);
      place(rowMark, GUTTER, top, picture.texts.length * step, bottom - top);
      const word = words.children[cursor.column];
      word.classList.add("shown");
      const above = word.offsetTop - words.offsetTop;
      if (!pointsAtWord && (above < words.scrollTop || above > words.scrollTop + 140)) {
        words.scrollTop = above - 60;
      }
      const head = line.head === null ? "all heads" : `head ${line.head}`;
      const where = `layer ${line.place}, ${head}, ${columnName(picture, cursor.column)}`;
      const how = howHeld(line.codes[cursor.column], columnSize(picture, cursor.column));
      const heads = `${percent(shares[cursor.column], 1)} of all heads keep it`;
      const text = make("b", "", picture.texts[cursor.column].replaceAll("\n", "⏎") || " ");
      const rest = ` ${where}: ${how}. ${heads}. Spec ${line.spec}; this head keeps ` +
        `${number(line.kept)} of ${number(picture.tokens)}.`;
      detail.classList.remove("dim");
      say(text, rest);
    };

    const columnAt = (x) =>
      Math.max(0, Math.min(picture.texts.length - 1, Math.floor((x - GUTTER) / step)));

    const pointed = (event) => {
      pointsAtWord = false;
      const box = field.getBoundingClientRect();
      const y = event.clientY - box.top;
      let line = tops.findIndex(({ bottom }) => y < bottom);
      if (line < 0) line = lines.length - 1;
      cursor = lines.length ? { line, column: columnAt(event.clientX - box.left) } : null;
      drawCursor();
    };

    const leave = () => {
      if (document.activeElement === field) return;
      detail.setAttribute("aria-live", "off");
      cursor = null;
      drawCursor();
    };

    field.addEventListener("pointermove", pointed);
    field.addEventListener("pointerdown", pointed);
    field.addEventListener("pointerleave", leave);
    field.addEventListener("focus", () => {
      detail.setAttribute("aria-live", "polite");
      cursor = cursor || (lines.length ? { line: 0, column: picture.texts.length - 1 } : null);
      drawCursor();
    });
    field.addEventListener("blur", leave);
    field.addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey || !lines.length) return;
      const now = cursor || { line: 0, column: 0 };
      const last = picture.texts.length - 1;
      const layer = lines[Math.min(now.line, lines.length - 1)].layer;
      const jump = (to) => Math.max(0, lines.findIndex((line) => line.layer === to));
      const moves = {
        ArrowLeft: () => ({ ...now, column: now.column - 1 }),
        ArrowRight: () => ({ ...now, column: now.column + 1 }),
        ArrowUp: () => ({ ...now, line: now.line - 1 }),
        ArrowDown: () => ({ ...now, line: now.line + 1 }),
        PageUp: () => ({ ...now, line: jump(Math.max(0, layer - 1)) }),
        PageDown: () => ({ ...now, line: jump(Math.min(picture.layers.length - 1, layer + 1)) }),
        Home: () => ({ ...now, column: 0 }),
        End: () => ({ ...now, column: last }),
      };
      if (!moves[event.key]) return;
      event.preventDefault();
      pointsAtWord = false;
      const next = moves[event.key]();
      cursor = {
        line: Math.max(0, Math.min(lines.length - 1, next.line)),
        column: Math.max(0, Math.min(last, next.column)),
      };
      drawCursor();
    });
    words.addEventListener("pointerover", (event) => {
      const column = event.target.dataset && event.target.dataset.column;
      if (column === undefined || !lines.length) return;
      cursor = { line: cursor ? cursor.line : 0, column: Number(column) };
      pointsAtWord = true;
      drawCursor();
    });
    words.addEventListener("pointerleave", leave);

    let width = 0;
    new ResizeObserver(() => {
      if (element.clientWidth === width) return;
      width = element.clientWidth;
      draw();
    }).observe(element);
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

    const update = (given, columns = 0) => {
      picture = given;
      room = columns;
      lines = linesOf(given);
      shares = sharesOf(lines, given.texts.length);
      draw();
    };
    draw();
    return { update, clear: () => update(empty) };
  };

  Object.assign(window.kvkeep, { heatmap, summary, bytes });
})();
