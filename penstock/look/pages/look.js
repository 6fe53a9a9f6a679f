"use strict";
// Token tooltips, keyboard movement between tokens, and the mask of another loss policy. Shared by report and viewer.
(() => {
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "status");
  document.body.append(tip);

  const bytesOf = (token) => token.dataset.b ?? [...new TextEncoder().encode(token.textContent)]
    .map((byte) => byte.toString(16).padStart(2, "0")).join(" ");

  const place = (token) => {
    let index = Number(token.parentElement.dataset.i);
    for (let before = token.previousElementSibling; before; before = before.previousElementSibling) index += 1;
    return index;
  };

  const line = (name, value) => {
    const row = document.createElement("div");
    const strong = document.createElement("b");
    strong.textContent = value;
    row.append(name + " ", strong);
    return row;
  };

  const show = (token) => {
    const run = token.parentElement.dataset;
    const trained = token.parentElement.classList.contains("trained");
    tip.replaceChildren(
      line("id", token.dataset.t),
      line("bytes", bytesOf(token) || "none"),
      line("token", `${place(token)} · ${run.r} · ${run.p}${Number(run.n) >= 0 ? " of message " + run.n : ""}`),
      line("", trained ? "trained" + (run.w !== "0" && run.w !== "1" ? `, weight ${run.w}` : "") : "masked"),
    );
    tip.hidden = false;
    const box = token.getBoundingClientRect();
    const own = tip.getBoundingClientRect();
    const top = box.bottom + 8 + own.height < innerHeight ? box.bottom + 8 : box.top - own.height - 8;
    const left = Math.max(6, Math.min(box.left, innerWidth - own.width - 6));
    // The one place that sets styles: through the object model, which a strict policy allows.
    tip.style.top = `${top}px`;
    tip.style.left = `${left}px`;
  };

  const hide = () => {
    tip.hidden = true;
    document.querySelector(".tokens i.current")?.classList.remove("current");
  };

  document.addEventListener("mouseover", (event) => {
    const token = event.target.closest?.(".tokens i");
    if (token) show(token);
    else if (!document.querySelector(".tokens i.current")) tip.hidden = true;
  });
  document.addEventListener("click", (event) => {
    const token = event.target.closest?.(".tokens i");
    if (token) show(token);
  });
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

  document.addEventListener("keydown", (event) => {
    const group = event.target.closest?.(".tokens");
    if (!group || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") return hide();
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    const all = [...group.querySelectorAll("i")];
    const at = all.findIndex((token) => token.classList.contains("current"));
    const next = all[Math.min(all.length - 1, Math.max(0, at + (event.key === "ArrowRight" ? 1 : -1)))];
    if (!next) return;
    event.preventDefault();
    all[at]?.classList.remove("current");
    next.classList.add("current");
    next.scrollIntoView({ block: "nearest" });
    show(next);
  });

  // Radio buttons named train_on show the mask of that policy; data-m of a run has one character per policy.
  const masks = document.querySelectorAll("input[name=train_on][data-policy]");
  const apply = (policy) => {
    let trained = 0;
    for (const run of document.querySelectorAll(".run")) {
      const on = run.dataset.m[policy] === "1";
      run.classList.toggle("trained", on);
      if (on) trained += run.childElementCount;
    }
    for (const message of document.querySelectorAll(".message")) {
      let own = 0;
      for (const run of message.querySelectorAll(".run.trained")) own += run.childElementCount;
      const count = message.querySelector(".count-trained");
      if (count) count.textContent = own ? `${own.toLocaleString("en")} trained` : "none trained";
    }
    const total = document.querySelector("[data-trained-total]");
    if (total) total.textContent = trained.toLocaleString("en");
  };
  for (const radio of masks) {
    radio.addEventListener("change", () => {
      apply(Number(radio.dataset.policy));
      const url = new URL(location.href);
      url.searchParams.set("train_on", radio.value);
      history.replaceState(null, "", url);
    });
  }
  const edges = document.querySelector("input[name=edges]");
  edges?.addEventListener("change", () => document.body.classList.toggle("edges", edges.checked));
})();
