
"use strict";
// The page says everything without this. With it the table of hosts can be searched, and sorted by a column.
(() => {
  const ids = ["filter", "words", "result", "found", "more", "table"];
  const [form, words, result, found, more, table] = ids.map((id) => document.getElementById(id));
  // A browser takes seconds to lay out thousands of rows, and nobody reads them all.
  const few = 500;
  let limit = few;
  let rows = [...table.tBodies[0].rows];
  const texts = new Map();
  const text = (row) => {
    if (!texts.has(row)) texts.set(row, row.textContent.toLowerCase());
    return texts.get(row);
  };
  const show = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const fits = (!result.value || row.cells[1].textContent === result.value) && wanted.every((word) => text(row).includes(word));
      count += fits;
      row.hidden = !fits || count > limit;
    }
    const shown = Math.min(count, limit);
    found.textContent = `${count} of ${rows.length} hosts` + (shown < count ? `, the first ${shown} are shown` : "");
    more.hidden = shown === count;
  };
  const search = () => {
    limit = few;
    show();
  };
  const all = () => {
    limit = rows.length;
    show();
  };
  const order = new Intl.Collator("en", { numeric: true });
  const sort = (heading) => {
    const column = heading.cellIndex;
    const down = heading.getAttribute("aria-sort") === "ascending";
    const key = (row) => row.cells[column].dataset.n ?? row.cells[column].textContent;
    const sorted = rows.map((row) => [key(row), row]).sort(([one], [other]) => order.compare(one, other));
    rows = (down ? sorted.reverse() : sorted).map(([, row]) => row);
    for (const each of table.tHead.rows[0].cells) each.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    table.tBodies[0].append(...rows);
    show();
  };
  for (const heading of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    button.addEventListener("click", () => sort(heading));
    heading.append(button);
  }
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", search);
  more.addEventListener("click", all);
  // A link to a host shows it, whatever was searched for before.
  const reveal = () => {
    const row = document.getElementById(location.hash.slice(1));
    if (row?.hidden) {
      form.reset();
      all();
      row.scrollIntoView();
    }
  };
  addEventListener("hashchange", reveal);
  addEventListener("beforeprint", all);
  form.hidden = false;
  show();
  reveal();
})();
