// The rows of a page of the list. Values from records are set as text, never as HTML.
export function render({ model }) {
  const table = document.createElement("table")
  const draw = () => {
    const head = document.createElement("thead").appendChild(document.createElement("tr"))
    for (const name of ["compare", ...model.heads]) {
      const cell = document.createElement("th")
      cell.scope = "col"
      cell.textContent = name
      head.append(cell)
    }
    const body = document.createElement("tbody")
    for (const [key, ...texts] of model.rows) {
      const row = body.insertRow()
      const box = document.createElement("input")
      box.type = "checkbox"
      box.value = key
      box.checked = model.chosen.includes(key)
      box.setAttribute("aria-label", `compare ${texts[0]}`)
      box.addEventListener("change", () => {
        const others = model.chosen.filter((each) => each !== key)
        model.chosen = box.checked ? [...others, key] : others
      })
      row.insertCell().append(box)
      for (const text of texts) row.insertCell().textContent = text
    }
    table.replaceChildren(head.parentNode, body)
  }
  const mark = () => {
    for (const box of table.querySelectorAll("input")) {
      box.checked = model.chosen.includes(box.value)
    }
  }
  model.on("rows", draw)
  model.on("chosen", mark)
  draw()
  return table
}
