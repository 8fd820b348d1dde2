"use strict";
// A click on the head of a column sorts its table. The page is complete without this script.
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    if (!head.textContent) button.setAttribute("aria-label", "sort by this column");
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.order;
      const text = (row) => row.cells[column].textContent;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === undefined && y === undefined) {
          // Unknown values come last in both orders.
          if (text(a) === "-" || text(b) === "-") return (text(a) === "-") - (text(b) === "-");
          const order = text(a).localeCompare(text(b), "en", { numeric: true });
          return down ? -order : order;
        }
        if (x === undefined || y === undefined) return x === undefined ? 1 : -1;
        return down ? y - x : x - y;
      });
      table.tBodies[0].append(...rows);
    });
  });
}
