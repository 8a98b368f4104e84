"""The benchmark's prompts: each answer stands in its text once, in the fact, at the depth that is named."""

import yaml

from benchmarks import compression_quality


def test_every_answer_stands_in_the_fact_alone():
    data = yaml.safe_load(compression_quality.PROMPTS.read_text(encoding="utf-8"))
    assert len(data["prompts"]) == 10
    depths = []
    for prompt in data["prompts"]:
        text, rest = compression_quality.text_of(prompt, data["passages"])
        answer, fact = prompt["answer"].strip(), prompt["fact"]
        assert prompt["answer"] == f" {answer}" and fact.startswith(prompt["lead"].split()[0])
        assert answer in fact and text.count(fact) == 1
        assert answer not in text.replace(fact, "") and answer not in rest
        depths.append(text.index(fact) / len(text))
        assert abs(depths[-1] - prompt["depth"]) < 0.06  # sentences differ in length
        assert text.count("\n\n") == len(prompt["passages"]) - 1
        # nothing but the fact was added, and nothing is lost
        words = " ".join(data["passages"][name] for name in prompt["passages"]).split()
        assert len(text.split()) == len(words) + len(fact.split())
    assert depths == sorted(depths)
