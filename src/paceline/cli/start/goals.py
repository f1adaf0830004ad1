"""The output of ``paceline`` without arguments: goals, and the first command for each."""

_GOALS = (
    ("see it work, in five minutes", "paceline demo"),
    ("train a model on my text", "paceline data prepare corpus --tokenizer bytes --out tokens"),
    ("", "paceline train init > run.toml"),
    ("", "paceline train run.toml --ranks 2"),
    ("turn a budget of FLOPs into a model", "paceline loop run.toml --budget 1e13"),
    ("know which layout is fastest", "paceline plan search --model llama3-70B --devices 64"),
    ("know whether a model fits in memory", "paceline plan memory --model large --device h100-sxm"),
    ("find out why a step is slow", "paceline profile step --model small --out profile"),
    ("compare DDP, ZeRO and FSDP", "paceline bench ddp --strategies torch_ddp bucketed sharded"),
    ("know how large a model to train", "paceline scaling fit runs.jsonl --budgets 1e20"),
    ("know what failures cost at scale", "paceline plan goodput --devices 16384"),
    ("check this machine", "paceline env --self-test"),
    ("emulate a slow network", "paceline lab run --hosts 2 --rate 1gbit -- paceline bench ddp"),
)


def goals_text() -> str:
    """Returns the goals with their commands, formatted for 80 columns."""
    lines = [
        "Paceline plans, runs and explains the data-parallel training of language models.",
        "",
        "I want to",
    ]
    for goal, command in _GOALS:
        if goal:
            lines.append(f"  {goal}:")
        lines.append(f"      {command}")
    lines += ["", "paceline --help lists all commands; paceline COMMAND --help shows its options."]
    return "\n".join(lines) + "\n"
