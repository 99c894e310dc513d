// A table that is wider than its page scrolls: let the keyboard reach it.
function reachTables() {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
}
addEventListener("load", reachTables);
addEventListener("resize", reachTables);
new MutationObserver(reachTables).observe(document.documentElement, { childList: true, subtree: true }); // the theme wraps tables late
