"use strict";
// Keyboard navigation, and a search that fills the list as hits arrive.
(() => {
  const typing = (target) => target.closest?.("input, select, textarea, .tokens");
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape" && event.target.matches?.("input")) return event.target.blur();
    if (typing(event.target)) return;
    const go = (selector) => { const link = document.querySelector(selector); if (link) location.href = link.href; };
    const list = [...document.querySelectorAll(".rows li > a")];
    const move = (by) => {
      const at = list.indexOf(document.activeElement);
      list[Math.max(0, Math.min(list.length - 1, at + by))]?.focus();
    };
    switch (event.key) {
      case "/": document.querySelector("#q") ? document.querySelector("#q").focus() : location.assign("/"); break;
      case "g": document.querySelector("#jump")?.focus(); break;
      case "j": list.length ? move(1) : go("a[rel=next]"); break;
      case "k": list.length ? move(-1) : go("a[rel=prev]"); break;
      case "n": go("a[rel=next]"); break;
      case "p": go("a[rel=prev]"); break;
      case "u": go("a[rel=up]"); break;
      default: return;
    }
    event.preventDefault();
  });

  const panel = document.querySelector("#search");
  if (!panel) return;
  const status = document.querySelector("#search-status");
  const stop = document.querySelector("#search-stop");
  const more = document.querySelector("#search-more");
  const hits = document.querySelector("#hits");
  const number = (value) => value.toLocaleString("en");
  const span = (kind, text) => {
    const element = document.createElement("span");
    element.className = kind;
    element.append(text);
    return element;
  };
  const query = new URL(location.href).search;

  const add = (hit) => {
    const link = document.createElement("a");
    link.href = `/row/${hit.row}${query}`;
    const head = span("row-head", span("row-number", number(hit.row)));
    head.append(span("row-count", `${number(hit.tokens)} tokens, ${number(hit.trained)} trained`));
    const mark = document.createElement("mark");
    mark.textContent = hit.match;
    const found = document.createElement("bdi");
    found.append(hit.before, mark, hit.after);
    link.append(head, span("row-text", found));
    const item = document.createElement("li");
    item.append(link);
    hits.append(item);
  };

  let control = null;
  let next = 0;
  const run = async () => {
    control = new AbortController();
    stop.hidden = false;
    more.hidden = true;
    const url = new URL(panel.dataset.url, location.href);
    if (next) url.searchParams.set("after", next);
    let scanned = next;
    let rows = 0;
    const tell = (text) => { status.textContent = `${text} ${number(hits.children.length)} hits in ${number(scanned)} of ${number(rows)} rows.`; };
    try {
      const response = await fetch(url, { signal: control.signal });
      if (!response.ok) { status.textContent = "The search was refused."; stop.hidden = true; return; }
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let left = "";
      next = null;
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        const lines = (left + value).split("\n");
        left = lines.pop();
        for (const line of lines) {
          const said = JSON.parse(line);
          if (said.hit) add(said.hit);
          const now = said.progress ?? said.done;
          if (now) { scanned = now.scanned; rows = now.rows; tell("Searching."); }
          if (said.done) next = said.done.next;
        }
      }
      tell(next ? "So far:" : "Done:");
      more.hidden = !next;
    } catch (error) {
      if (error.name !== "AbortError") { status.textContent = "The viewer does not answer."; }
      else { next = scanned; tell("Stopped:"); more.hidden = scanned >= rows; }
    }
    stop.hidden = true;
  };
  stop.addEventListener("click", () => control?.abort());
  more.addEventListener("click", run);
  run();
})();
