"use strict";
// Nothing here is needed to read the report: it sorts tables, copies commands and unfolds what paper needs.
document.documentElement.classList.add("scripted");

function compare(numeric, up) {
  return ([a], [b]) => {
    if (a === "" || b === "") return (a === "") - (b === ""); // what is not known comes last, whichever way
    const order = numeric ? Number(a) - Number(b) : a.localeCompare(b, "en", { numeric: true });
    return up ? order : -order;
  };
}

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  heads.forEach((head, place) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const keyed = [...body.rows].map((row) => [row.cells[place].dataset.key, row]);
      keyed.sort(compare(head.classList.contains("number"), up));
      body.append(...keyed.map(([, row]) => row));
    });
  });
}

for (const block of document.querySelectorAll(".code")) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(block.querySelector("code").textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(block.querySelector("code")); // the browser forbids it: ready for Ctrl-C
      button.textContent = "Selected";
    }
  });
  block.append(button);
}

addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details.printed")) details.open = true;
});
