"""A plan for this machine's CPU printed as text, from its JSON alone."""

from typing import Any

from launcher.console import say
from launcher.tables import plain_table, wide_console


def print_plan(plan: dict[str, Any]) -> None:
    """Prints the time of a step, and the slowest process's time by part."""
    processes, share = plan["processes"], plan["share_of_a_core"]
    say(
        f"PLAN, no measurement of the step: {plan['name']} by {processes} process{'es' if processes > 1 else ''} on "
        f"{plan['cores']} cores, one thread each; each gets {share:.0%} of a core as the machine is now"
    )
    whole = sum(plan["seconds_by_part"].values())
    table = plain_table("the slowest process, on a core of its own", ">ms", ">share")
    for part, seconds in sorted(plan["seconds_by_part"].items(), key=lambda each: -each[1]):
        table.add_row(part, f"{seconds * 1e3:,.1f}", f"{seconds / whole:.1%}")
    wide_console().print(table)
    say(f"\n{plan['step_seconds'] * 1e3:,.0f} ms a step, {plan['tokens_per_second']:,.0f} tokens/s")
    say(f"from rates measured now, of products, bytes and messages by themselves; {plan['calls']:,} calls a step")
