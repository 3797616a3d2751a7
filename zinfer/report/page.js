// Asks for the page every two seconds, and shows it in place of the old one if it is another.
(() => {
  const note = document.createElement("output");
  let tag = "";
  const show = async answer => {
    tag = answer.headers.get("ETag");
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const body = document.adoptNode(page.body);
    const open = new Set([...document.querySelectorAll("details[open] > summary")].map(line => line.textContent));
    for (const line of body.querySelectorAll("summary")) line.parentElement.open = open.has(line.textContent);
    await Promise.all([...body.querySelectorAll("img")].map(image => image.decode().catch(() => {})));
    document.body.replaceWith(body); // at once and with its pictures: the scroll position stays
  };
  const ask = async () => {
    try {
      if (!document.hidden) {
        const answer = await fetch("/", { cache: "no-store", headers: { "If-None-Match": tag } });
        if (answer.ok) await show(answer);
        note.remove();
      }
    } catch {
      note.textContent = "zinfer report --serve has ended: this page does not change any more.";
      document.querySelector("header").prepend(note);
    }
    setTimeout(ask, 2000);
  };
  setTimeout(ask, 2000);
})();
