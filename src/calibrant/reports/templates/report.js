(() => {
  "use strict";
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (tag, properties = {}) => Object.assign(document.createElement(tag), properties);

  // Sorting. Tables whose rows are models are sorted together.
  const linked = all("table[data-linked]");
  const status = document.getElementById("sorted");
  const order = new Intl.Collator(undefined, { numeric: true });

  // Missing figures stay last in both directions.
  const compare = (column, sign) => (one, other) => {
    const [a, b] = [one, other].map((row) => row.cells[column]);
    if (!("value" in a.dataset)) return sign * order.compare(a.textContent, b.textContent);
    const [x, y] = [a, b].map((cell) => cell.dataset.value);
    if (x === "" || y === "") return (x === "") - (y === "");
    return Number(x) === Number(y) ? 0 : sign * (Number(x) < Number(y) ? -1 : 1);
  };

  const sort = (header) => {
    const table = header.closest("table");
    const before = header.getAttribute("aria-sort");
    const first = header.dataset.first || (header.cellIndex ? "descending" : "ascending");
    const now = before ? (before === "ascending" ? "descending" : "ascending") : first;
    const together = "linked" in table.dataset ? linked : [table];
    for (const each of together) {
      for (const other of all("[aria-sort]", each)) other.removeAttribute("aria-sort");
    }
    header.setAttribute("aria-sort", now);
    for (const body of table.tBodies) {
      const fixed = [...body.rows].filter((row) => row.cells.length === 1);
      const rows = [...body.rows].filter((row) => row.cells.length > 1);
      rows.sort(compare(header.cellIndex, now === "ascending" ? 1 : -1));
      body.append(...fixed, ...rows);
    }
    for (const each of together.filter((each) => each !== table)) {
      const own = new Map([...each.tBodies[0].rows].map((row) => [row.dataset.model, row]));
      for (const row of table.tBodies[0].rows) each.tBodies[0].append(own.get(row.dataset.model));
    }
    status.textContent = `Sorted by ${header.textContent.trim()}, ${now}.`;
  };

  // Export. Values are not rounded, and percentages are fractions. Intervals are as printed, in columns of their own.
  const words = (node) => (node ? node.textContent.trim().replace(/\s+/g, " ") : "");
  const quoted = (text) => {
    // A spreadsheet would run a name such as "=1+1" as a formula.
    const inert = /^[=+\-@]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text;
    return /[",\n]/.test(inert) ? `"${inert.replaceAll('"', '""')}"` : inert;
  };
  const interval = (cell) => cell.querySelector(".interval");
  const value = (cell) => {
    if ("value" in cell.dataset) return cell.dataset.value;
    const plain = cell.cloneNode(true);
    for (const each of all(".interval", plain)) each.remove();
    return words(plain);
  };
  const csv = (table) => {
    const rows = all("tr", table).map((row) => [...row.cells]);
    const ranges = new Set(rows.flatMap((row) => row.filter(interval).map((cell) => cell.cellIndex)));
    const range = (cell) => {
      const text = words(interval(cell));
      return cell.closest("thead") ? `${value(cell)}: ${text || "interval"}` : text;
    };
    const line = (row) => row.flatMap((cell) => (ranges.has(cell.cellIndex) ? [value(cell), range(cell)] : [value(cell)]));
    return rows.map((row) => line(row).map(quoted).join(",") + "\r\n").join("");
  };

  const save = (table) => {
    const link = make("a", { download: `${table.dataset.csv}.csv` });
    link.href = URL.createObjectURL(new Blob([csv(table)], { type: "text/csv" }));
    link.click();
    URL.revokeObjectURL(link.href);
  };

  for (const table of all("table[data-csv]")) {
    for (const header of all("thead th", table)) {
      const button = make("button", { type: "button" });
      button.append(...header.childNodes);
      button.addEventListener("click", () => sort(header));
      header.append(button);
    }
    const button = make("button", { type: "button", className: "export", textContent: "Save as CSV" });
    button.title = "Values that are not rounded; percentages as fractions";
    button.addEventListener("click", () => save(table));
    table.closest(".scroll").after(button);
  }

  // Hover.
  const tip = document.body.appendChild(make("div", { id: "tip", hidden: true }));
  tip.setAttribute("role", "status");
  const show = (event) => {
    const over = event.target.closest?.("[data-tip]");
    tip.hidden = !over;
    if (!over) return;
    tip.textContent = over.dataset.tip;
    const box = over.getBoundingClientRect();
    const [x, y] = event.clientX === undefined ? [box.right, box.top] : [event.clientX, event.clientY];
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 18}px`;
  };
  for (const kind of ["pointermove", "pointerdown", "focusin"]) document.addEventListener(kind, show);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

  // Navigation: mark the section that is being read.
  const links = all("nav a");
  const mark = () => {
    const passed = links.filter((link) => document.querySelector(link.hash).getBoundingClientRect().top < 120);
    const atEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 2 && scrollY > 0;
    const current = atEnd ? links.at(-1) : passed.at(-1) || links[0];
    for (const link of links) link.toggleAttribute("aria-current", link === current);
  };
  document.addEventListener("scroll", mark, { passive: true });
  mark();

  // Reliability of one class, on demand. The bars are those of charts.jinja.
  const source = document.getElementById("class-diagrams");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const choice = document.getElementById("class-choice");
  const place = document.getElementById("class-charts");
  data.classes.forEach(([name], k) => choice.append(new Option(name, k)));
  choice.prepend(new Option("choose a class", "", true, true));

  const svg = (tag, parent, attributes) => {
    const made = parent.appendChild(document.createElementNS("http://www.w3.org/2000/svg", tag));
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const [across, upwards] = place.dataset.axes.split("|");
  const percent = (value) => `${(100 * value).toFixed(1)} %`;

  const draw = (name, model, bins) => {
    const card = make("figure", { className: "card" });
    card.append(make("h3", { textContent: data.models[model] }));
    if (!bins.length) {
      card.append(make("p", { textContent: "This model never predicts the class.", className: "quiet" }));
      return card;
    }
    const chart = document.querySelector("svg.reliability").cloneNode(true);
    chart.setAttribute("aria-label", `Reliability of the predictions “${name}” of ${data.models[model]}`);
    const [bars, shares] = [".bins", ".shares"].map((part) => chart.querySelector(part));
    bars.replaceChildren();
    shares.replaceChildren();
    const most = Math.max(...bins.map((bin) => bin[1]));
    const width = data.width;
    for (const [number, count, ...rounded] of bins) {
      const [confidence, accuracy, low, high] = rounded.map((value) => value / 1000);
      const x = number * width;
      const certain = 1 - (high - low);
      const about = across === "confidence" ? `predicted as ${name}` : `${count === 1 ? "decision" : "decisions"} of ${name}`;
      const text = `${across[0].toUpperCase()}${across.slice(1)} ${x.toFixed(2)} to ${(x + width).toFixed(2)}: ${count} ${about}\n` +
        `mean ${across} ${percent(confidence)}\n${upwards} ${percent(accuracy)} [${percent(low)}, ${percent(high)}]`;
      const bar = svg("g", bars, { class: "bin", tabindex: 0, role: "img", "data-tip": text, "aria-label": text });
      svg("rect", bar, { class: "hit", x, y: 0, width, height: 1 });
      const lower = Math.min(accuracy, confidence);
      svg("rect", bar, { class: "accuracy", x, y: 0, width, height: lower, "fill-opacity": 0.12 + 0.78 * certain });
      svg("rect", bar, { class: accuracy < confidence ? "over" : "under", x, y: lower, width,
        height: Math.abs(accuracy - confidence), "fill-opacity": 0.1 + 0.5 * certain });
      svg("path", bar, { class: "confidence", d: `M${x} ${confidence}h${width}` });
      svg("path", bar, { class: "interval-bar", d: `M${x + width / 2} ${low}V${high}` });
      svg("rect", shares, { class: "share", x: x + 0.04 * width, y: 0, width: 0.92 * width,
        height: Math.max(count / most, 0.015), "data-tip": text });
    }
    card.append(chart);
    return card;
  };

  choice.addEventListener("change", () => {
    if (choice.value === "") return place.replaceChildren();
    const [name, models] = data.classes[choice.value];
    place.replaceChildren(...models.map((bins, model) => draw(name, model, bins)));
  });
})();
