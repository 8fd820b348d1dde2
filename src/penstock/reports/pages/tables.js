"use strict";
// A click on the head of a column sorts its table. The page is complete without this script.
(() => {
  const UNITS = {
    "": 1, "%": 1, x: 1, us: 1e-6, "µs": 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600, d: 86400,
    B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, PiB: 2 ** 50, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12,
    k: 1e3, K: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15,
  };
  // The number by which a cell is sorted: its first quantity, in the base of its unit; null if it has none.
  function orderOf(text) {
    const quantity = /([+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)\s*([A-Za-zµ%]*)\s*/y;
    let total = null;
    for (let found = quantity.exec(text); found && found[2] in UNITS; found = quantity.exec(text)) {
      total = (total || 0) + Number(found[1].replaceAll(",", "")) * UNITS[found[2]];
      if (!["min", "h", "d"].includes(found[2])) break; // such as 1 min 34 s
    }
    return total;
  }
  for (const table of document.querySelectorAll(".sorted table")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const cells = [...table.tBodies[0].rows].map((row) => row.cells[column]);
      const orders = new Map(cells.map((cell) => [cell.parentElement, orderOf(cell.textContent)]));
      const words = cells.every((cell) => orders.get(cell.parentElement) === null);
      for (const cell of [head, ...cells]) cell.classList.toggle("words", words);
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      if (!head.textContent) button.setAttribute("aria-label", "sort by this column");
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const text = (row) => row.cells[column].textContent;
        const rows = [...table.tBodies[0].rows].sort((a, b) => {
          const [x, y] = [orders.get(a), orders.get(b)];
          if (x === null && y === null) {
            // Unknown values come last in both orders.
            if (text(a) === "-" || text(b) === "-") return (text(a) === "-") - (text(b) === "-");
            const order = text(a).localeCompare(text(b), "en", { numeric: true });
            return down ? -order : order;
          }
          if (x === null || y === null) return x === null ? 1 : -1;
          return down ? y - x : x - y;
        });
        table.tBodies[0].append(...rows);
      });
    });
  }
})();
