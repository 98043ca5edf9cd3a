// Draws the page for the data at its end, and leaves on the document what a test can read.

const PAGES = { step: stepPage, study: studyPage, comparison: comparisonPage };

window.addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });
const shown = JSON.parse(document.getElementById("data").textContent);
document.getElementById("page").append(...PAGES[shown.page](shown).filter((node) => node !== null));
Chart.all.forEach((chart) => chart.draw());
document.documentElement.dataset.requests = performance.getEntriesByType("resource").length;
document.documentElement.dataset.ready = "yes";
