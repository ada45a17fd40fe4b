// What is wrong with the page that is open, as a list of sentences: see tests/tools/test_pictures_browser.py.
(() => {
  const found = [];
  const parse = (text) => {
    const numbers = (text.match(/[\d.]+/g) || []).map(Number);
    return text.startsWith("rgb") ? [numbers[0], numbers[1], numbers[2], numbers[3] ?? 1] : null;
  };
  const light = ([r, g, b]) => [r, g, b]
    .map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, k) => sum + c * [0.2126, 0.7152, 0.0722][k], 0);
  const contrast = (a, b) => {
    const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05); // of the Web Content Accessibility Guidelines
  };
  const over = (top, under) => top.slice(0, 3).map((c, k) => c * top[3] + under[k] * (1 - top[3]));
  /** What an element paints behind words, or null. */
  const paint = (node, style) => {
    if (!(node instanceof SVGElement) || node instanceof SVGSVGElement)
      return parse(style.backgroundColor);
    if (["text", "tspan", "style", "title"].includes(node.tagName)) return null;
    const colour = parse(style.fill);
    return colour && [...colour.slice(0, 3), colour[3] * Number(style.fillOpacity)];
  };
  /** The colour under a point, all layers laid over each other. */
  const ground = (node, x, y) => {
    const layers = [];
    for (const under of document.elementsFromPoint(x, y)) {
      const colour = paint(under, getComputedStyle(under));
      if (colour && colour[3] > 0) layers.push(colour);
      if (colour && colour[3] === 1) break;
    }
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const canvas = dark && getComputedStyle(document.documentElement).colorScheme.includes("dark");
    return layers.reverse().reduce((under, top) => over(top, under), canvas ? [18, 18, 18] : [255, 255, 255]);
  };
  for (const node of document.querySelectorAll("*")) node.style.pointerEvents = "auto";
  const own = (node) => [...node.childNodes].some((c) => c.nodeType === 3 && c.data.trim());
  const hidden = ["STYLE", "SCRIPT", "TITLE", "style", "title", "script", "OPTION"];
  const places = [];
  for (const node of document.querySelectorAll("*")) {
    if (!own(node) || hidden.includes(node.tagName) || !node.checkVisibility?.()) continue;
    node.scrollIntoView({ block: "center", inline: "nearest" });
    const box = node.getBoundingClientRect(), style = getComputedStyle(node);
    if (!box.width || !box.height) continue;
    const words = node.textContent.trim().slice(0, 40), drawn = node instanceof SVGElement;
    const colour = parse(drawn ? style.fill : style.color);
    const x = Math.min(Math.max(box.x + box.width / 2, 1), innerWidth - 2), y = box.y + box.height / 2;
    const under = ground(node, x, y), much = contrast(over(colour, under), under);
    if (much < 4.5) found.push(`"${words}" has a contrast of ${much.toFixed(2)}`);
    if (drawn && node.tagName === "text") places.push([words, box.x + scrollX, box.y + scrollY, box.width, box.height]);
    const sheet = drawn && node.ownerSVGElement && outermost(node).getBoundingClientRect();
    if (sheet && (box.x < sheet.x - 1 || box.right > sheet.right + 1 || box.bottom > sheet.bottom + 1 || box.y < sheet.y - 1))
      found.push(`"${words}" leaves the picture`);
  }
  function outermost(node) {
    let sheet = node.ownerSVGElement;
    while (sheet.ownerSVGElement) sheet = sheet.ownerSVGElement;
    return sheet;
  }
  for (let a = 0; a < places.length; a++)
    for (let b = a + 1; b < places.length; b++) {
      const [one, x, y, w, h] = places[a], [two, u, v, s, t] = places[b];
      const wide = Math.min(x + w, u + s) - Math.max(x, u), high = Math.min(y + h, v + t) - Math.max(y, v);
      if (wide > 1.5 && high > 0.35 * Math.min(h, t)) found.push(`"${one}" lies on "${two}"`);
    }
  scrollTo(0, 0);
  const page = document.documentElement;
  if (page instanceof HTMLElement && page.scrollWidth > page.clientWidth)
    found.push(`the page is ${page.scrollWidth - page.clientWidth} points too wide`);
  for (const node of document.querySelectorAll("body *")) {
    const scrolls = ["auto", "scroll"].includes(getComputedStyle(node).overflowX);
    if (node instanceof HTMLElement && node.scrollWidth > node.clientWidth + 1 && !scrolls && node.clientWidth)
      found.push(`<${node.tagName}> holds more than fits: ${node.textContent.trim().slice(0, 40)}`);
  }
  return found;
})()
