// The server's page: a conversation by the API, and what the cache holds meanwhile.
"use strict";

(() => {
  const { heatmap, summary, prefixes, make, number, bytes, percent } = window.kvkeep;
  const KEY = "kvkeep-api-key";
  const BUSY_MS = 2000; // between two looks at the server's figures
  const IDLE_MS = 15000;

  const at = (id) => document.getElementById(id);
  const map = heatmap(at("map"));
  const bars = summary(at("summary"));
  const tree = prefixes(at("prefixes"));
  const log = at("log");
  const question = at("question");

  let model = "";
  let messages = []; // of the conversation, as the API takes them
  let running = null; // the AbortController of the answer under way

  // -- the API ----------------------------------------------------------------------------------

  const headers = () => {
    const key = sessionStorage.getItem(KEY);
    return key ? { authorization: `Bearer ${key}` } : {};
  };

  class Refused extends Error {
    constructor(message, status, code = null) {
      super(message);
      this.status = status;
      this.code = code;
    }
  }

  /** A response, or an error with the server's own words. */
  const call = async (path, options = {}) => {
    let response;
    try {
      const all = { ...headers(), ...options.headers };
      response = await fetch(path, { ...options, headers: all });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused("The server does not answer; see whether it still runs.", 0);
    }
    if (response.ok) return response;
    const body = await response.json().catch(() => ({}));
    const { message, code } = body.error || { message: response.statusText };
    throw new Refused(`${message} (status ${response.status})`, response.status, code);
  };

  /** The objects of a stream of server-sent events, whose last event is `[DONE]`. */
  async function* objects(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const read = () =>
      reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        return { done: true }; // the connection broke
      });
    let rest = "";
    for (;;) {
      const { value, done } = await read();
      if (done) throw new Refused("The answer was cut off; see whether the server still runs.", 0);
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  }

  // -- what the page says -----------------------------------------------------------------------

  const complain = (error) => {
    const problem = at("problem");
    let text = error ? error.message : "";
    if (error && error.code === "no_chat_template") {
      text += '. Choose "Plain text" in the settings.';
    }
    problem.hidden = !text;
    if (problem.textContent !== text) problem.textContent = text; // which is read out
    if (error && error.status === 401) askForKey();
  };

  const askForKey = () => {
    sessionStorage.removeItem(KEY);
    at("forget").hidden = true;
    at("key-form").hidden = false;
    at("key").focus();
  };

  const follow = () => {
    log.scrollTop = log.scrollHeight;
  };

  /** Add a message to the conversation; returns the text nodes of it and of its reasoning, and where
   * figures of it go. */
  const show = (role, text) => {
    at("hint").hidden = true;
    const article = make("article", `message ${role}`);
    const thought = make("details", "thought");
    const reasoning = document.createTextNode("");
    thought.open = true;
    thought.hidden = true;
    thought.append(make("summary", "", "Reasoning"), reasoning);
    const said = make("div", "said");
    const content = document.createTextNode(text);
    said.append(content);
    const about = make("p", "about");
    about.hidden = true;
    const who = role === "user" ? "You" : model || "Answer";
    article.append(make("h3", "", who), thought, said, about);
    log.append(article);
    follow();
    return { article, thought, reasoning, content, about };
  };

  const setBusy = (busy) => {
    at("send").disabled = busy || !model;
    at("stop").disabled = !busy;
  };

  // -- figures of all answers -------------------------------------------------------------------

  let timer = 0;
  let mayLook = true;

  /** What is to be asked next, and when; in place of what was. */
  const later = (ask, milliseconds) => {
    clearTimeout(timer);
    timer = setTimeout(ask, milliseconds);
  };

  const figuresOf = (text) => {
    const found = {};
    for (const line of text.split("\n")) {
      const [name, value, more] = line.split(" ");
      if (value !== undefined && more === undefined) found[name] = Number(value);
    }
    return found;
  };

  const strip = (rows) => {
    const items = rows.map(([name, value]) => {
      const item = make("div");
      item.append(make("dt", "", name), make("dd", "", value));
      return item;
    });
    at("server").replaceChildren(...items);
  };

  const look = async () => {
    if (!mayLook || !model) return;
    clearTimeout(timer);
    if (!document.hidden) {
      try {
        const found = figuresOf(await (await call("metrics")).text());
        const prompts = found.kvkeep_prompt_tokens_total || 0;
        const reused = found.kvkeep_prompt_tokens_found_total || 0;
        const rows = [
          ["running", number(found.kvkeep_answers_running || 0)],
          ["waiting", number(found.kvkeep_requests_waiting || 0)],
          ["caches", bytes(found.kvkeep_cache_bytes || 0)],
        ];
        if ("kvkeep_store_bytes" in found) rows.push(["store", bytes(found.kvkeep_store_bytes)]);
        rows.push(["found of all prompts", percent(reused, prompts)]);
        strip(rows);
      } catch (error) {
        mayLook = error.status !== 403; // for others than this client
        strip([]);
      }
    }
    if (model) later(look, running ? BUSY_MS : IDLE_MS);
  };

  // -- a question and its answer ----------------------------------------------------------------

  let shown = null; // the newest picture, until it is drawn

  /** The specs of a picture's layers, with the number of layers of each if they differ. */
  const specsOf = (picture) => {
    const counts = new Map();
    for (const { spec } of picture.layers) counts.set(spec, (counts.get(spec) || 0) + 1);
    const all = [...counts];
    if (all.length === 1) return all[0][0];
    return all.map(([spec, count]) => `${number(count)} layers: ${spec}`).join("; ");
  };

  const picture = (cache) => {
    if (!shown) {
      requestAnimationFrame(() => {
        const newest = shown;
        shown = null;
        if (!newest) return;
        bars.update(newest);
        at("spec").textContent = specsOf(newest);
        map.update(newest);
        tree.update(newest.prefixes);
      });
    }
    shown = cache;
  };

  const numberIn = (id) => {
    const field = at(id);
    return field.value === "" ? undefined : Number(field.value);
  };

  const requestFor = (said) => {
    const options = {
      model,
      stream: true,
      stream_options: { include_usage: true, include_cache: true },
      temperature: numberIn("temperature"),
      max_tokens: numberIn("max-tokens"),
    };
    if (at("mode").value === "text") {
      const prompt = said.map(({ content }) => content).join("");
      return ["v1/completions", { ...options, prompt }];
    }
    const system = at("system").value;
    const before = system.trim() ? [{ role: "system", content: system }] : [];
    return ["v1/chat/completions", { ...options, messages: [...before, ...said] }];
  };

  /** What an answer cost, in words. */
  const cost = (usage, begun, first, last) => {
    const { prompt_tokens: prompt, completion_tokens: made } = usage;
    const found = usage.prompt_tokens_details.cached_tokens;
    const said = [
      `${number(prompt)} prompt tokens, ${number(found)} found`,
      `${number(made)} new tokens`,
    ];
    if (first) said.push(`first after ${((first - begun) / 1000).toFixed(2)} s`);
    if (made > 1 && last > first) {
      said.push(`${(((made - 1) * 1000) / (last - first)).toFixed(1)} tokens/s`);
    }
    return said.join(" · ");
  };

  const send = async (text) => {
    complain(null);
    const asked = { role: "user", content: text };
    const own = show("user", text);
    const answer = show("assistant", "");
    answer.article.setAttribute("aria-busy", "true");
    const control = new AbortController();
    running = control;
    setBusy(true);
    look();
    const begun = performance.now();
    let first = 0;
    let last = 0;
    const [path, body] = requestFor([...messages, asked]);
    // Fast models send many tokens in a frame, and the browser lays out all text for each change.
    const fresh = { content: "", reasoning: "" }; // text that is not drawn yet
    const draw = () => {
      const below = log.scrollHeight - log.scrollTop - log.clientHeight;
      if (fresh.reasoning) answer.thought.hidden = false;
      if (fresh.content && !answer.content.data) answer.thought.open = false;
      answer.reasoning.appendData(fresh.reasoning);
      answer.content.appendData(fresh.content);
      fresh.content = fresh.reasoning = "";
      if (below < 40) follow();
    };
    const kept = () => {
      draw();
      messages.push(asked, { role: "assistant", content: answer.content.data });
    };
    try {
      const response = await call(path, {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(body),
        signal: control.signal,
      });
      for await (const chunk of objects(response)) {
        if (chunk.error) throw new Refused(chunk.error.message, 0);
        if (chunk.cache && running === control) picture(chunk.cache);
        const choice = chunk.choices && chunk.choices[0];
        const { content, reasoning_content: thought } = (choice && (choice.delta || choice)) || {};
        const piece = content || (choice && choice.text) || "";
        if (piece || thought) {
          last = performance.now();
          first = first || last;
          if (!fresh.content && !fresh.reasoning) requestAnimationFrame(draw);
          fresh.content += piece;
          fresh.reasoning += thought || "";
        }
        if (chunk.usage) {
          draw();
          answer.about.textContent = cost(chunk.usage, begun, first, last);
          answer.about.hidden = false;
          follow();
        }
      }
      if (running === control) kept();
    } catch (error) {
      if (running !== control) return; // a new conversation
      const stopped = error.name === "AbortError";
      draw();
      if (answer.content.data || answer.reasoning.data) {
        kept();
        answer.about.textContent = stopped ? "stopped" : "cut off";
        answer.about.hidden = false;
      } else {
        own.article.remove();
        answer.article.remove();
        at("hint").hidden = messages.length > 0;
        question.value = question.value || text;
      }
      if (error.status === 404) await begin(); // the server may have another model now
      if (!stopped) complain(error);
    } finally {
      answer.article.removeAttribute("aria-busy");
      if (running === control) {
        running = null;
        setBusy(false);
      }
      look();
    }
  };

  // -- controls ---------------------------------------------------------------------------------

  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = question.value;
    if (running || !model || !text.trim()) return;
    question.value = "";
    question.focus();
    send(text);
  });

  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    at("ask").requestSubmit();
  });

  at("stop").addEventListener("click", () => {
    if (running) running.abort();
    question.focus();
  });

  at("new").addEventListener("click", () => {
    if (running) {
      const control = running;
      running = null;
      control.abort();
    }
    setBusy(false);
    messages = [];
    shown = null;
    for (const article of log.querySelectorAll("article")) article.remove();
    at("hint").hidden = false;
    complain(null);
    map.clear();
    bars.clear();
    at("spec").textContent = "";
    tree.clear();
    question.focus();
  });

  at("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = at("key").value.trim();
    at("key").value = "";
    if (!/^[!-~]+$/.test(key)) {
      complain(new Error("API keys are printable ASCII without spaces; paste yours again."));
      return;
    }
    sessionStorage.setItem(KEY, key);
    at("key-form").hidden = true;
    at("forget").hidden = false;
    question.focus();
    begin();
  });

  at("forget").addEventListener("click", () => {
    model = "";
    at("model").textContent = "";
    strip([]);
    setBusy(Boolean(running));
    askForKey();
  });

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) look();
  });

  /** Ask for the model, until the server tells it. */
  const begin = async () => {
    clearTimeout(timer);
    model = "";
    try {
      const { data } = await (await call("v1/models")).json();
      model = data[0].id;
      document.title = `${model} · kvkeep`;
      mayLook = true;
      complain(null);
      look();
    } catch (error) {
      complain(error);
      if (error.status !== 401) later(begin, BUSY_MS);
    }
    at("model").textContent = model;
    setBusy(Boolean(running));
  };

  setBusy(false);
  at("forget").hidden = !sessionStorage.getItem(KEY);
  question.focus();
  begin();
})();
