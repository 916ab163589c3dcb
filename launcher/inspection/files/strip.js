// A text, token by token; one token can be chosen, by pointer or by arrow keys.

class Strip {
  // onToken(number); under(number) -> text below a token, or null; shade(number) -> [0 to 1, colour's name] or a hue
  constructor(words, strip, place) {
    Object.assign(this, strip);
    this.tokens = words.map((word, number) => {
      const token = make("span", { role: "option", "aria-selected": "false", onclick: () => this.choose(number) }, make("span", {}, word));
      if (this.under) token.append(make("small", {}, this.under(number)));
      return token;
    });
    this.element = make("div", { class: "strip", role: "listbox", tabindex: "0", "aria-label": "the text's tokens; arrow keys choose one" });
    this.tokens.forEach((token, number) => {
      if (number && words[number].startsWith("\\n")) this.element.append(make("br"));
      this.element.append(token);
    });
    this.element.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 }[event.key];
      if (!move) return;
      event.preventDefault();
      this.choose(Math.max(0, Math.min(this.tokens.length - 1, this.chosen + move)));
    });
    this.readout = make("p", { class: "readout", "aria-live": "polite" });
    place.append(this.element, this.readout);
    this.chosen = 0;
  }

  choose(number) {
    this.tokens[this.chosen].setAttribute("aria-selected", "false");
    this.chosen = number;
    this.tokens[number].setAttribute("aria-selected", "true");
    const { offsetTop: top, offsetHeight: height } = this.tokens[number];  // the page itself stays where it is
    if (top < this.element.scrollTop || top + height > this.element.scrollTop + this.element.clientHeight) this.element.scrollTop = top - this.element.clientHeight / 2;
    this.onToken(number);
  }

  // Parts from 0 to 1 shade tokens in one colour.
  shadeParts(partOf) {
    this.tokens.forEach((token, number) => {
      const part = partOf(number);
      token.style.setProperty("--part", part ? `${Math.round(55 * Math.sqrt(Math.min(1, part)))}%` : "0%");
    });
  }

  // Whole numbers give tokens their own hues.
  shadeKinds(kindOf) {
    this.tokens.forEach((token, number) => {
      token.classList.add("kind");
      token.style.setProperty("--hue", String(Math.round(kindOf(number) * 137.508) % 360));
    });
  }
}
