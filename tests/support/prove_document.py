"""Writes into docs/prove.md what a proof printed about every planted fault: python tests/support/prove_document.py

With words as arguments, only faults with one of these in their titles are run; the text on the others stays.
"""

import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from launcher.prove.report import Outcome
from prove_faults_listed import FAULTS, Fault
from prove_runs import prove_fault

DOCUMENT = Path(__file__).parents[2] / "docs" / "prove.md"
BEGIN, END = "<!-- begin faults -->\n", "<!-- end faults -->\n"


def main() -> int:
    """Rewrites the page between the marks; returns the number of faults that were not caught as expected."""
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    written, _, after = rest.partition(END)
    old = {
        match[2]: match[1] for match in re.finditer(r"^\d+(\. \*\*(.*?)\*\*.*?\n)(?=\n\d+\. |\Z)", written, re.M | re.S)
    }
    parts, missed, words = [], 0, sys.argv[1:]
    for number, fault in enumerate(FAULTS, 1):
        if words and not any(word in fault.title for word in words):
            parts.append(f"{number}{old[fault.title]}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            outcome = prove_fault(Path(folder), fault)
        text = section(number, fault, outcome)
        missed += fault.says not in text or outcome.proven
        print(text, flush=True)
        parts.append(text)
    DOCUMENT.write_text(before + BEGIN + "\n".join(parts) + END + after)
    return missed


def section(number: int, fault: Fault, outcome: Outcome) -> str:
    """The page's section on one fault: its layout, the checks that failed, and what the proof printed."""
    layout = " ".join(fault.overrides) or "dp=2, ZeRO 1"
    if outcome.died is not None:
        lines = outcome.died.strip().splitlines()
        body = "\n".join(f"    {line}" for line in dict.fromkeys((f"{fault.check}: no", lines[0], lines[-1])))
        return f"{number}. **{fault.title}** ({layout}): the processes do not come to an end.\n\n{body}\n"
    failed = [check for check in outcome.checks if not check.passed]
    check = next(check for check in failed if check.name == fault.check)
    told = f"{check.phase}, {check.name}: {check.worst}, error {check.error:.1e}, bound {check.bound:.0e}"
    lines = [told + (f" ({check.note})" if check.note else ""), *outcome.diagnosis]
    body = "\n".join(f"    {line}" for line in lines)
    return f"{number}. **{fault.title}** ({layout}): {len(failed)} of {len(outcome.checks)} checks fail.\n\n{body}\n"


if __name__ == "__main__":
    sys.exit(main())
