"""`--record tokens`: the file says what a run trained on, token by token, and a damaged file is refused."""

from __future__ import annotations

import json
from array import array

import pytest

from rollouts.cli import main
from rollouts.errors import ConfigError
from rollouts.runs import token_files
from rollouts.runs.folder import episode_records
from rollouts.runs.token_files import TokenSpan, TokenTable, encode_table, read_table, token_table
from rollouts.training.algorithms.recipes import GRPO
from rollouts.training.batching import make_batch, part_batch
from rollouts.training.rollout_gen.groups import Group, group_samples
from rollouts.types import Episode, Score, Segment, Status, Task, Trajectory

TASK = Task("one")


def segment(length, offset=0):
    """The odd tokens are sampled."""
    mask = [float(n % 2) for n in range(length)]
    logprobs = [-0.1 * n if weight else 0.0 for n, weight in enumerate(mask)]
    return Segment([offset + n for n in range(length)], mask, logprobs, [0 if weight else -1 for weight in mask])


def episode(order, *segments, status=Status.COMPLETED, others=0, score=1.0):
    """One trajectory for each tuple of segments."""
    own = [Trajectory(TASK, [], list(each), status) for each in segments]
    other = tuple(Trajectory(TASK, [], [segment(9)], Status.COMPLETED) for _ in range(others))
    return Episode(order, TASK, own, Score(score, {}, ""), {}, others=other)


GROUPS = [
    Group(0, TASK, (episode((0, 0), (segment(5),)), episode((0, 1), (segment(4, 100),))), dropped="zero_std"),
    Group(
        1,
        TASK,
        (
            episode((1, 0), (segment(6, 200), segment(3, 300)), (segment(7, 400),), others=1),
            episode((1, 1), (segment(4, 500),), status=Status.TRUNCATED),
            episode((1, 2), (segment(8, 600),), others=1),
        ),
    ),
    Group(2, TASK, (episode((2, 0), (segment(6, 700),)), episode((2, 1), (segment(5, 800),)))),
]


def batches_of(groups, parts, **settings):
    """As the loop makes them. The recorded logprob of a token is minus its id, its advantage that of its rollout."""
    kept = [group for group in groups if group.dropped is None]
    samples = group_samples(kept)
    count = 1 + samples[-1].rollout_index
    batch = make_batch(samples, [float(n) for n in range(count)], aggregation=GRPO.aggregation, step=0, **settings)
    parted = part_batch(batch, parts, GRPO.aggregation)
    for part in parted:
        live = [token for row in part.rows for token, weight in zip(row.tokens, row.loss_mask, strict=True) if weight]
        part.recorded = {
            "logprob": array("f", (-token for token in live)).tobytes(),
            "clipped": array("f", (token % 3 == 0 for token in live)).tobytes(),
        }
    return parted


@pytest.mark.parametrize("settings", [{"parts": 1}, {"parts": 2}, {"parts": 1, "pairs": [(0, 2), (0, 1), (3, 4)]}])
def test_every_value_is_at_its_token(settings):
    """With dropped groups, other models' lines, several trajectories and segments, and a truncated rollout."""
    table = token_table(GROUPS, batches_of(GROUPS, **settings))
    lines = [line for group in GROUPS for each in group.episodes for line in episode_records(each)]
    found = {}
    for span in table.spans:
        of_segment = table.of_line(span.line)[span.segment]
        tokens = lines[span.line]["segments"][span.segment]["tokens"]
        own = [tokens[position] for position in of_segment["position"]]
        assert of_segment["logprob"].tolist() == [-token for token in own]
        assert of_segment["clipped"].tolist() == [token % 3 == 0 for token in own]
        found[own[0] // 100] = own
    # The truncated rollout (5) and the dropped group (0 and 1) are not trained.
    assert found == {
        number: [100 * number + n for n in range(1, length, 2)]
        for number, length in {2: 6, 3: 3, 4: 7, 6: 8, 7: 6, 8: 5}.items()
    }
    assert "ref_logprob" not in table.channels and table.channels["clipped"].typecode == "B"


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_channel_that_only_some_batches_have_is_left_out(lacking):
    batches = batches_of(GROUPS, 2)
    del batches[lacking].recorded["logprob"]
    assert set(token_table(GROUPS, batches).channels) == {"position", "advantage", "clipped"}


TABLE = TokenTable(
    [TokenSpan(0, 0, 0, 2), TokenSpan(3, 1, 2, 1)],
    {"position": array("I", [4, 70_000, 2]), "logprob": array("f", [-0.5, -2, 0]), "clipped": array("B", [0, 1, 1])},
)


def test_a_file_is_read_back_and_one_cut_anywhere_is_refused(tmp_path):
    file = tmp_path / "step_000000.tokens"
    content = encode_table(TABLE)
    file.write_bytes(content)
    assert read_table(file) == TABLE
    head, _, _ = content.partition(b"\n")
    assert (len(head) + 1) % 8 == 0 and all(each["offset"] % 8 == 0 for each in json.loads(head)["channels"])
    for end in range(len(content)):
        file.write_bytes(content[:end])
        with pytest.raises(ConfigError, match="damaged"):
            read_table(file)
    file.write_bytes(content + b"x")
    with pytest.raises(ConfigError, match="damaged"):
        read_table(file)


@pytest.mark.parametrize(
    "old, new, words",
    [
        (b'"version":1', b'"version":2', "version 2"),
        (b'"dtype":"uint8"', b'"dtype":"int99"', "int99"),
        (b"[3,1,2,1]", b"[3,1,2,9]", "does not have"),
        (b"rollouts-tokens", b"something-else!", "damaged"),
    ],
)
def test_a_file_of_another_kind_is_refused(old, new, words, tmp_path):
    file = tmp_path / "step_000000.tokens"
    content = encode_table(TABLE)
    assert old in content
    file.write_bytes(content.replace(old, new))
    with pytest.raises(ConfigError, match=words):
        read_table(file)


def test_a_missing_file_says_how_one_is_written(tmp_path):
    with pytest.raises(ConfigError, match="--record tokens"):
        read_table(tmp_path / "step_000000.tokens")


def test_a_run_records_what_it_trained_on(monkeypatch, tmp_path):
    """The batches of the loop, the file and the trajectories say the same."""
    monkeypatch.chdir(tmp_path)
    seen = []

    def spy(groups, batches):
        seen.append(list(batches))
        return token_table(groups, batches)

    monkeypatch.setattr(token_files, "token_table", spy)
    flags = "--env calculator --record tokens --eval-tasks 0 --steps 1 --prompts-per-step 3 --samples-per-prompt 3"
    flags += " --minibatches 2 --max-tokens 24 --kl rk3_loss --filter= --out run"
    assert main(["run", *flags.split()]) == 0
    for step, batches in enumerate(seen):
        table = read_table(tmp_path / f"run/trajectories/step_{step:06d}.tokens")
        text = (tmp_path / f"run/trajectories/step_{step:06d}.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        rows = [row for batch in batches for row in batch.rows if any(row.loss_mask)]
        assert len(rows) == len(table.spans) > 0 and len(batches) == 2
        for row, span in zip(rows, table.spans, strict=True):
            own = table.of_line(span.line)[span.segment]
            shown = lines[span.line]["segments"][span.segment]
            assert shown["tokens"] == row.tokens
            assert own["position"].tolist() == [n for n, weight in enumerate(row.loss_mask) if weight]
            live = own["position"]
            for name, stream in (("advantage", row.advantages), ("ref_logprob", row.ref_logprobs)):
                assert own[name] == array("f", [stream[n] for n in live])
            # The sampler shares the trainer's weights. Only in the first minibatch the policy has not moved.
            if row in batches[0].rows:
                assert own["logprob"].tolist() == pytest.approx([shown["logprobs"][n] for n in live], abs=1e-3)
            assert all(value > 0 for value in own["entropy"])
