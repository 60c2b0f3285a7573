// The page of one run: pictures after each chunk, and a table of layers (see inspection.py).
"use strict";

(() => {
  const { heatmap, summary, make, number } = window.kvkeep;
  const { title, facts, texts, pictures } = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const last = pictures.length - 1;
  const whole = pictures[last];
  const map = heatmap($("map"));
  const bars = summary($("summary"));
  const slider = $("chunk");

  /** Counts of kept tokens, equal neighbours together: "3 × 128, 96". */
  const counted = (counts, heads) => {
    if (counts.length === 1) return heads > 1 ? `${heads} × ${number(counts[0])}` : number(counts[0]);
    const runs = [];
    for (const count of counts) {
      const run = runs[runs.length - 1];
      if (run && run.count === count) run.times += 1;
      else runs.push({ count, times: 1 });
    }
    return runs.map(({ count, times }) => (times > 1 ? `${times} × ` : "") + number(count)).join(", ");
  };

  const drawLayers = (picture) => {
    $("layers").replaceChildren(...picture.layers.map((layer) => {
      const line = make("tr");
      const name = make("th", "", String(layer.place));
      name.scope = "row";
      line.append(name, make("td", "mono", layer.spec), make("td", "number", number(layer.heads)),
        make("td", "", counted(layer.kept, layer.heads)));
      return line;
    }));
  };

  const show = (index) => {
    const picture = pictures[index];
    const when = `after ${number(picture.tokens)} of ${number(whole.tokens)} tokens`;
    slider.value = String(index);
    slider.setAttribute("aria-valuetext", when);
    $("when").textContent = when;
    $("back").disabled = index === 0;
    $("on").disabled = index === last;
    const columns = Math.ceil(picture.tokens / picture.group);
    map.update({ ...picture, texts: texts.slice(0, columns) }, texts.length);
    bars.update(picture);
    drawLayers(picture);
  };

  const move = (by) => show(Math.max(0, Math.min(last, Number(slider.value) + by)));

  $("title").textContent = title;
  for (const [name, value] of facts) {
    const item = make("div");
    item.append(make("dt", "", name), make("dd", "", value));
    $("facts").append(item);
  }
  slider.max = String(last);
  slider.addEventListener("input", () => show(Number(slider.value)));
  $("back").addEventListener("click", () => move(-1));
  $("on").addEventListener("click", () => move(1));
  $("time").hidden = last === 0;
  $("once").hidden = last !== 0;
  show(last);
})();
