// Arrow keys from stage to stage, the bar that says where one is, and a button that unfolds all checks.
const stages = [...document.querySelectorAll("main > section")];
const links = [...document.querySelectorAll(".steps a")];
let here = -1;

function mark() {
  const passed = stages.filter(s => s.getBoundingClientRect().top < innerHeight / 3).length - 1;
  if (passed === here) return;
  here = passed;
  links.forEach((link, i) => i === here ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current"));
  const bar = document.querySelector(".steps"), link = links[here];
  if (link) bar.scrollLeft = link.offsetLeft - bar.clientWidth / 2 + link.offsetWidth / 2;
}
addEventListener("scroll", mark, { passive: true });
addEventListener("resize", mark);
mark();

addEventListener("keydown", event => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  if (event.target.closest(".way > div, .steps")) return;  // these scroll sideways
  const next = stages[Math.max(0, Math.min(stages.length - 1, here + step))];
  if (step < 0 && here <= 0) { scrollTo(0, 0); return; }
  event.preventDefault();
  next.scrollIntoView();
  next.querySelector("h2").focus({ preventScroll: true });
});

const button = document.getElementById("unfold"), folds = [...document.querySelectorAll("details.fold")];
button.hidden = false;
button.addEventListener("click", () => {
  const open = button.getAttribute("aria-pressed") !== "true";
  button.setAttribute("aria-pressed", open);
  folds.forEach(fold => { fold.open = open; });
});

function reach() {  // what scrolls by itself can be reached by Tab
  for (const aside of document.querySelectorAll("aside")) {
    if (aside.scrollHeight > aside.clientHeight + 1) aside.tabIndex = 0;
    else aside.removeAttribute("tabindex");
  }
}
addEventListener("resize", reach);
reach();
