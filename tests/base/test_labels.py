"""Names and tags: text of strangers, checked as it comes in, and kept where a run goes on."""

import argparse
import re
from typing import Any

import pytest

from penstock.base import Labels, UsageError, add_flags, build, default_name, from_flags, run_labels


def given(*words: str) -> Labels:
    parser = argparse.ArgumentParser()
    add_flags(parser, Labels)
    return from_flags(Labels, parser.parse_args(words))


def test_a_flag_is_given_once_for_each_tag() -> None:
    labels = given("--name", " my run ", "--tag", "study=a", "--tag", "note=x=y & <b>", "--tag=n=1")
    assert (labels.name, labels.tag) == ("my run", {"study": "a", "note": "x=y & <b>", "n": "1"})
    assert given().tag == {} and given().name is None


def test_yaml_and_python_give_a_mapping() -> None:
    values = {"lr": 0.1, "baseline": True, "größe": "3", 7: "seven"}
    tags = build(Labels, {"tag": values}).tag
    assert tags == {"lr": "0.1", "baseline": "true", "größe": "3", "7": "seven"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tag": ["study"]}, "--tag: 'study' is not KEY=VALUE"),
        ({"tag": ["a="]}, "--tag: '' is empty"),
        ({"tag": ["a=\x1b[2J"]}, r"--tag: '\x1b[2J' holds control characters"),
        ({"tag": {"a": "b\nc"}}, r"--tag: 'b\nc' holds control characters"),
        ({"tag": {"<b>": "c"}}, "--tag: the key '<b>' begins with a letter or a digit, and has no"),
        ({"tag": {"a": "b" * 201}}, "has 201 characters, and 200 are the most"),
        ({"tag": {"a" * 61: "b"}}, "has 61 characters, and 60 are the most"),
        ({"tag": {str(n): "b" for n in range(51)}}, "--tag: 51 tags are given, and 50 are the mo"),
        ({"name": " "}, "--name: ' ' is empty"),
        ({"name": "a\x07"}, r"--name: 'a\x07' holds control characters"),
        ({"name": "a" * 10_000_000}, "has 10000000 characters, and 120 are the most"),
    ],
)
def test_what_is_no_label_is_refused_in_a_sentence(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as error:
        build(Labels, settings)
    assert len(str(error.value)) < 200


def test_a_run_that_goes_on_keeps_its_name_and_takes_further_tags() -> None:
    before = {"name": "first", "tags": {"study": "a", "who": "me"}}
    more = build(Labels, {"tag": {"study": "b"}})
    merged = {"study": "b", "who": "me"}
    assert run_labels(more, "default", before) == {"name": "first", "tags": merged}
    renamed = build(Labels, {"name": "second"})
    assert run_labels(renamed, "default", before)["name"] == "second"
    assert run_labels(more, "default") == {"name": "default", "tags": {"study": "b"}}
    assert run_labels(more, "default", {"of an older": "version"})["name"] == "default"


def test_no_key_of_this_machine_becomes_a_label(monkeypatch) -> None:
    monkeypatch.setenv("COMET_API_KEY", "planted-4f1c9e77a0b24d6c")
    labels = build(Labels, {"tag": {"a": "planted-4f1c9e77a0b24d6c", "api_token": "b"}})
    assert run_labels(labels, "run")["tags"] == {"a": "***", "api_token": "***"}


def test_default_names_tell_runs_apart() -> None:
    names = {default_name("spiral", "4gpu") for _ in range(9)}
    assert all(re.fullmatch(r"spiral-4gpu-\d{8}-\d{6}-[0-9a-f]{4}", name) for name in names)
    assert len(names) > 1
    assert default_name("my/model.py:Net").startswith("my-model.py-Net-2")
    assert len(default_name("x" * 500)) < 120
    assert default_name("///").startswith("run-")
