// Shows the prefixes that a store holds for a client: kvkeep.prefixes.
"use strict";

(() => {
  const { make, number, bytes } = window.kvkeep;
  const DEEPEST = 12; // steps to the right

  /** Nodes in the order of a walk, each with how far it stands to the right: a run that follows
   * its parent alone stands below it. */
  const walked = (nodes) => {
    const children = nodes.map(() => []);
    nodes.forEach((node, index) => {
      if (node.parent >= 0) children[node.parent].push(index);
    });
    const found = [];
    const waiting = [[0, 0]];
    while (waiting.length) {
      const [index, depth] = waiting.pop();
      const own = children[index];
      const branches = own.length + nodes[index].left_out > 1;
      if (index) found.push({ node: nodes[index], depth });
      const next = index && branches ? depth + 1 : depth;
      for (const child of [...own].reverse()) waiting.push([child, next]);
    }
    return found;
  };

  const described = ({ shared, tokens, text }) => {
    if (!shared) return "of another prompt";
    const visible = text.replaceAll("\n", "⏎");
    return shared < tokens ? `${visible} (${number(shared)} tokens are this answer's)` : visible;
  };

  /** A list of stored prefixes in an element. Returns an object with `update(nodes)`, where null
   * means that this client shares none, and with `clear()`. */
  const prefixes = (element) => {
    const total = make("p", "dim");
    const list = make("ul", "prefixes");
    element.replaceChildren(total, list);

    const update = (nodes) => {
      if (nodes === null || nodes.length < 2) {
        total.textContent =
          nodes === null
            ? "No prompt prefixes are kept for this client."
            : "No prompt prefix is stored with this cache yet.";
        list.replaceChildren();
        return;
      }
      const sum = (name) => nodes.reduce((so, node) => so + node[name], 0);
      const hidden = sum("left_out");
      total.textContent =
        `${number(sum("tokens"))} tokens in ${bytes(sum("bytes"))}; this answer's own are marked` +
        (hidden ? `; ${number(hidden)} branches are not listed.` : ".");
      list.replaceChildren(
        ...walked(nodes).map(({ node, depth }) => {
          const item = make("li", node.shared ? "own" : "");
          item.style.marginInlineStart = `${Math.min(depth, DEEPEST)}rem`;
          const held = `${number(node.tokens)} tokens, ${bytes(node.bytes)}`;
          const text = make("span", node.shared ? "text" : "dim", described(node));
          if (node.shared) text.title = node.text;
          item.append(make("span", "", node.locked ? `${held}, in use` : held), text);
          return item;
        }),
      );
    };
    const clear = () => {
      total.textContent = "The prefixes that later prompts can begin with.";
      list.replaceChildren();
    };
    clear();
    return { update, clear };
  };

  Object.assign(window.kvkeep, { prefixes });
})();
