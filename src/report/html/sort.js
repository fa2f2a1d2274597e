// Sorts a table by the column whose header is pressed. Without this script the tables are as readable, in their own order.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const original = [...body.rows];
  const headers = [...table.tHead.rows[0].cells];
  const key = (row, at) => row.cells[at].dataset.value ?? row.cells[at].textContent.trim();
  const compare = (a, b, numbers) => (numbers ? a - b : a.localeCompare(b, "en", { numeric: true }));
  headers.forEach((header, at) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => {
      const down = header.ariaSort === "ascending";
      headers.forEach((other) => other.removeAttribute("aria-sort"));
      header.setAttribute("aria-sort", down ? "descending" : "ascending");
      const numbers = header.classList.contains("n");
      const rows = [...original].sort((a, b) => {
        const [x, y] = [key(a, at), key(b, at)];
        if (x === "" || y === "") return (x === "") - (y === "");
        return down ? compare(y, x, numbers) : compare(x, y, numbers);
      });
      body.append(...rows);
    });
  });
}
