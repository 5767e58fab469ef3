"""Acceptance rates of the n-gram draft, counted on real runs: python benchmarks/ngram_profile.py --out FILE

So was the profile made that `optimal:` trees are planned for until rates are measured for the pair at hand. Every
expanded node of one depth has the same number of children, so that a rank's rate is counted at all visits that could
show it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import read_prompts
from rich.console import Console
from rich.progress import track

import sequoia
from sequoia.measure.prompts import BUILT_IN, SOURCE_FORMS
from sequoia.speculate.stats import Stats

BRANCHES = (16, 8, 4, 3, 2, 2, 2, 1)  # children of an expanded node, by depth
EXPANDED = (1, 6, 6, 6, 6, 4, 4, 4)  # nodes expanded, by depth


def counting_shape() -> sequoia.TreeShape:
    parents, level = [-1], [(0, 0)]  # (sum of ranks on the path, node)
    for branch, expanded in zip(BRANCHES, EXPANDED, strict=True):
        children = []
        for cost, node in sorted(level)[:expanded]:
            children += [(cost + rank, len(parents) + rank) for rank in range(branch)]
            parents += [node] * branch
        level = children
    return sequoia.TreeShape(parents)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", default=[BUILT_IN], help=SOURCE_FORMS)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 0.6])
    parser.add_argument("--out", type=Path, required=True, help="profile file to write")
    options = parser.parse_args()
    engine = sequoia.load(tree=counting_shape())
    prompts = read_prompts(options.prompts, options.count, engine)
    total = Stats()
    for request, prompt in enumerate(track(prompts, console=Console(stderr=True))):
        for temperature in options.temperature:
            params = sequoia.SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=0)
            total.merge(engine.generate(prompt, params, request=request).stats)
    profile = sequoia.AcceptanceProfile.from_counts(
        total.visits,
        total.accepted,
        {
            "draft": "n-gram",
            "target": engine.target.loaded.name,
            "method": "counted on the target's own runs by benchmarks/ngram_profile.py",
            "prompts": sorted(Path(source).stem for source in options.prompts),
            "requests": len(prompts) * len(options.temperature),
            "temperatures": options.temperature,
            "visits": total.visits,
        },
    )
    profile.save(options.out)
    Console().print(profile, total.visits, f"tokens per round {total.mean_accepted_length:.3f}")


if __name__ == "__main__":
    main()
