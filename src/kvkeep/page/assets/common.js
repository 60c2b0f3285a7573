// What the scripts of all pages use: kvkeep.make, kvkeep.number, kvkeep.percent.
"use strict";

window.kvkeep = {
  /** A new element. */
  make(name, className = "", text = "") {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text) element.textContent = text;
    return element;
  },

  /** A number as text: whole if it is large, otherwise three digits. */
  number(value) {
    if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en-US");
    return String(Number(value.toPrecision(3)));
  },

  percent(part, whole = 1) {
    return `${Number((whole ? (100 * part) / whole : 0).toPrecision(3))} %`;
  },
};
