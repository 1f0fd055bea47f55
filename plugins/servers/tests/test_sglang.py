"""The dialect of SGLang: what is sent, how answers are read, and what is said where one is wrong.

The client is a script here. The contract fake is asked in `test_faults`, real servers in `tests/engines`.
"""

from __future__ import annotations

import re
from functools import partial

import msgspec
import pytest
import trio
from rollouts_servers.dialect import GroupPlace, RequestTarget
from rollouts_servers.http import HTTPFailure, failure_of_status
from rollouts_servers.options import ServerOptions
from rollouts_servers.sglang import (
    SGLang,
    create_sglang_inference,
    group_ranks,
    join_group,
    leave_group,
    receive,
    serve_sglang,
)

from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.base import GenerateRequest, TensorInfo, WeightUpdate
from rollouts.plugins.checks import run_check

URL = "http://server:30000"
WORK = RequestTarget("0-1-2", "policy", "abcd-3")
KEY = "a-secret-key"


class Refused(Exception):
    """A status other than 200, with its body."""


class Client:
    """Answers each path with what `replies` has for it: JSON, an exception, or a list of them, one after another."""

    url = URL

    def __init__(self, **replies):
        self.replies = {path.replace("__", "/"): reply for path, reply in replies.items()}
        self.asked = []

    async def get(self, path, reply_type, **settings):
        return await self.post(path, None, reply_type, **settings)

    async def post(self, path, body, reply_type, *, timeout_seconds=None, attempts_max=None):
        await trio.lowlevel.checkpoint()
        sent = msgspec.json.decode(msgspec.json.encode(body))
        self.asked.append((path, sent))
        reply = self.replies.get(path.lstrip("/"), {})
        if isinstance(reply, list):
            reply = reply.pop(0)
        if callable(reply):
            reply = reply(sent)
        if isinstance(reply, Refused):
            status, said = reply.args
            raise failure_of_status(status, msgspec.json.encode(said), None)
        if isinstance(reply, Exception):
            raise reply
        if reply_type is bytes:
            return b""
        try:
            return msgspec.json.decode(msgspec.json.encode(reply), type=reply_type)
        except msgspec.ValidationError as error:
            raise HTTPFailure("garbage", str(error), retryable=False) from error

    def sent(self, path):
        return [body for asked, body in self.asked if asked == path]

    @property
    def paths(self):
        return [path for path, _ in self.asked]


def answer(ids, finish="length", *, logprobs=None, version="3", prompt=(), **reason):
    values = logprobs or [-0.5 - index for index in range(len(ids))]
    return {
        "text": "",
        "output_ids": ids,
        "meta_info": {
            "id": "0-1-2.",
            "finish_reason": {"type": finish, **reason},
            "weight_version": version,
            "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[value, token, None] for value, token in zip(values, ids, strict=True)],
            "input_token_logprobs": [[None if not place else -float(place), t, None] for place, t in enumerate(prompt)],
            "cached_tokens": 0,
        },
    }


def generate(client, *, max_tokens=8, stop=(2,), work=WORK, **settings):
    request = GenerateRequest([5, 6, 7], max_tokens, stop, settings.pop("seed", 11), **settings)
    return trio.run(partial(SGLang().generate, client, request, work))


# --- generating -------------------------------------------------------------------------------------------------------


def test_a_request_says_all_that_shapes_the_distribution():
    client = Client(generate=answer([9, 2], "stop", matched=2))
    sampled = generate(client, temperature=0.7, seed=-1)
    assert sampled == ([9, 2], [-0.5, -1.5], "stop", (("3", 0, 2),))
    (sent,) = client.sent("/generate")
    assert sent["input_ids"] == [5, 6, 7] and sent["return_logprob"] and sent["extra_key"] == "abcd-3"
    assert "lora_path" not in sent, "the base model's name is no adapter"
    assert sent["sampling_params"] == {
        "max_new_tokens": 8,
        "temperature": 0.7,
        "stop_token_ids": [2],
        "ignore_eos": False,
        "sampling_seed": 2**63 - 1,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }


def test_no_name_begins_as_another_one():
    client = Client(generate=answer([9]))
    generate(client, max_tokens=1, work=WORK)
    generate(client, max_tokens=1, work=RequestTarget("0-1-23"))
    trio.run(SGLang().abort, client, ["0-1-2", "x"])
    one, other = (sent["rid"] for sent in client.sent("/generate"))
    aborted = [sent["rid"] for sent in client.sent("/abort_request")]
    assert aborted == [one, "x."] and not other.startswith(one)


def test_the_models_own_end_of_text_ends_nothing_that_was_not_asked_to_end():
    client = Client(generate=[answer([9, 1], "stop", matched=1), answer([8, 1], "stop"), answer([4, 3], version="4")])
    sampled = generate(client, max_tokens=6)
    assert sampled.tokens == [9, 1, 8, 1, 4, 3] and sampled.finish == "length"
    assert sampled.spans == (("3", 0, 4), ("4", 4, 6))
    sent = client.sent("/generate")
    assert [each["input_ids"] for each in sent] == [[5, 6, 7], [5, 6, 7, 9, 1], [5, 6, 7, 9, 1, 8, 1]]
    assert [each["sampling_params"]["max_new_tokens"] for each in sent] == [6, 4, 2]
    # As the last token there may be, it is the length that ends.
    assert generate(Client(generate=answer([9, 1], "stop")), max_tokens=2).finish == "length"
    # Without stop ids all of them are off.
    client = Client(generate=answer([9, 1]))
    generate(client, max_tokens=2, stop=())
    assert client.sent("/generate")[0]["sampling_params"]["ignore_eos"]


def test_an_aborted_reply_comes_back_as_far_as_it_came():
    sampled = generate(Client(generate=answer([9, 8], "abort", message="Aborted", status_code=None)))
    assert (sampled.tokens, sampled.finish) == ([9, 8], "abort")
    early = generate(Client(generate=answer([], "abort", message="Abort in waiting queue")))
    assert early == ([], [], "abort", ())


def test_an_adapters_request_names_it():
    adapter = trio.run(partial(load_adapter, Client(), 3))
    client = Client(generate=answer([9], version="default"))
    generate(client, work=RequestTarget("a", adapter, "abcd-3"), max_tokens=1)
    assert client.sent("/generate")[0]["lora_path"] == adapter, "and the base's version does not matter"


@pytest.mark.parametrize(
    ("reply", "words", "is_transient"),
    [
        (answer([9], "abort", message="out of memory", status_code=500), "aborted a request: out of memory", True),
        (answer([9], "tool_calls"), "ended a reply with 'tool_calls'", True),
        (answer([9], logprobs=[None]), "no finite logprob for token 9", True),
        ({**answer([9]), "output_ids": [8]}, "that do not match", True),
        (answer([9], version="default"), "'default', but it got version 3: was it restarted", True),
        (answer([9], version="2"), "'2', but it got version 3", True),
    ],
)
def test_answers_that_are_wrong(reply, words, is_transient):
    with pytest.raises(InferenceError, match=re.escape(words)) as caught:
        generate(Client(generate=reply), max_tokens=1)
    assert caught.value.is_transient is is_transient


def test_later_weights_may_answer_and_version_0_may_be_what_it_was_started_with():
    assert generate(Client(generate=answer([9], version="4")), max_tokens=1).spans == (("4", 0, 1),)
    generate(Client(generate=answer([9], version="default")), max_tokens=1, work=RequestTarget("a", "", "abcd-0"))
    generate(Client(generate=answer([9], version="default")), max_tokens=1, work=RequestTarget("a"))


@pytest.mark.parametrize(
    ("said", "retryable"),
    [
        ("Duplicate request ID detected: x", True),
        ("Got LoRA adapter that has never been loaded: x", True),
        ("Failed to implicitly load LoRA adapter x: no such folder", True),
        ("The input (600 tokens) is longer than the model's context length (512 tokens).", False),
    ],
)
def test_what_another_try_can_mend_is_retryable(said, retryable):
    with pytest.raises(HTTPFailure, match=re.escape(said)) as caught:
        generate(Client(generate=Refused(400, {"error": {"message": said}})))
    assert caught.value.retryable is retryable and caught.value.status == 400


# --- scoring, tokenizing ----------------------------------------------------------------------------------------------


def score(client, tokens):
    return trio.run(SGLang().score, client, tokens, WORK)


def test_scores_are_of_the_prompts_own_tokens():
    client = Client(generate=answer([], prompt=[5, 6, 0]))  # the vocabulary's last id is called 0
    assert score(client, [5, 6, 66]) == [0.0, -1.0, -2.0]
    (sent,) = client.sent("/generate")
    assert sent["logprob_start_len"] == 0 and sent["sampling_params"]["max_new_tokens"] == 0
    for prompt in ([5, 6], [5, 7, 66], [5, 6, 65]):
        with pytest.raises(InferenceError, match=r"prompt tokens|that do not match"):
            score(Client(generate=answer([], prompt=prompt)), [5, 6, 66])


def test_tokenize():
    client = Client(tokenize={"tokens": [4, 5], "count": 2, "max_model_len": 9})
    assert trio.run(SGLang().tokenize, client, "words") == [4, 5]
    assert client.sent("/tokenize") == [{"prompt": "words", "add_special_tokens": False}]
    assert trio.run(SGLang().tokenize, Client(tokenize=Refused(400, "no tokenizer")), "words") is None
    with pytest.raises(HTTPFailure):
        trio.run(SGLang().tokenize, Client(tokenize=Refused(401, {"error": "Unauthorized"})), "words")


# --- greeting ---------------------------------------------------------------------------------------------------------

INFO = {
    "version": "0.5.23.post1",
    "served_model_name": "policy",
    "api_key": KEY,
    "max_req_input_len": 506,
    "enable_lora": True,
    "max_lora_rank": 8,
    "tp_size": 2,
}


def measured(sampled, scored):
    """Answers to the requests that measure the convention: a sampled token, and its score."""

    def reply(body):
        if body["sampling_params"]["max_new_tokens"]:
            return answer([9], logprobs=[sampled])
        made = answer([], prompt=body["input_ids"])
        made["meta_info"]["input_token_logprobs"][1][0] = scored
        return made

    return reply


def handshake(*, info=INFO, **replies):
    given = {"generate": measured(-2.0, -3.0), "v1__models": {"data": [{"max_model_len": 512}]}, "server_info": info}
    client = Client(**(given | replies))
    return trio.run(SGLang().handshake, client), client


def test_greeting():
    info, client = handshake()
    assert info.software == "SGLang 0.5.23.post1" and info.models == ("policy",)
    assert info.context_tokens_max == 506, "a prompt has to be shorter"
    assert info.loads_adapters and info.lora_rank_max == 8 and info.loads_weights
    assert client.paths[:4] == ["/server_info", "/ready", "/abort_request", "/v1/models"]
    plain, _ = handshake(info={"version": "0.6", "served_model_name": "m", "enable_lora": None, "max_lora_rank": None})
    assert not plain.loads_adapters and plain.lora_rank_max == 0
    assert not handshake(info=INFO | {"dp_size": 2})[0].loads_adapters


@pytest.mark.parametrize(
    ("logprobs", "convention"),
    [((-2.0, -3.0), "processed"), ((-2.0, -2.2), "processed"), ((-2.0, -2.0), "raw"), ((-2.0, -2.05), "raw")],
)
def test_the_convention_of_logprobs_is_measured(logprobs, convention):
    assert handshake(generate=measured(*logprobs))[0].logprobs == convention


@pytest.mark.parametrize(
    ("replies", "words"),
    [
        (
            {"info": INFO | {"version": "0.5.21"}},
            "0.5.21 at http://server:30000 is too old: 0.5.22 or newer is needed; type pip",
        ),
        ({"server_info": {"vllm_config": 1}}, "is not an SGLang server"),
        ({"server_info": Refused(404, "")}, "is not an SGLang server"),
        (
            {"ready": Refused(503, "")},
            "curl -X POST -H 'content-type: application/json' -d '{}' http://server:30000/cont",
        ),
        ({"abort_request": Refused(401, {"error": "Unauthorized"})}, "--admin-api-key"),
    ],
)
def test_servers_that_cannot_be_used(replies, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        handshake(**replies)
    assert KEY not in str(caught.value)


def test_a_key_that_is_refused_is_for_the_engine_to_say():
    with pytest.raises(HTTPFailure) as caught:
        handshake(server_info=Refused(401, {"error": "Unauthorized"}))
    assert caught.value.status == 401


# --- weights ----------------------------------------------------------------------------------------------------------


def load_full(client, version=7):
    update = WeightUpdate(version, path="/weights/v000007")
    return SGLang().load_full(client, update)


def load_adapter(client, version=7, old=""):
    update = WeightUpdate(version, "adapter", path="/weights/v000007")
    return SGLang().load_adapter(client, update, old=old)


def test_a_full_reload_pauses_flushes_and_goes_on():
    client = Client()
    trio.run(load_full, client)
    assert client.asked == [
        ("/pause_generation", {"mode": "retract"}),
        (
            "/update_weights_from_disk",
            {"model_path": "/weights/v000007", "load_format": "auto", "weight_version": "7", "flush_cache": True},
        ),
        ("/continue_generation", {}),
    ]


DEAD = HTTPFailure("reset", "the server closed the connection before its reply was complete", retryable=True)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (
            Refused(400, {"success": False, "message": "Failed to get weights iterator: no"}),
            "it still serves the old weights",
        ),
        (Refused(400, {"success": False, "message": "Failed to update weights: shape"}), "a mixture of old and new"),
        (DEAD, "it crashed or hangs: restart it"),
    ],
)
def test_a_full_reload_that_fails_is_final_and_the_server_goes_on(failure, words):
    client = Client(update_weights_from_disk=failure, continue_generation=[{}, DEAD])
    with pytest.raises(InferenceError, match=words) as caught:
        trio.run(load_full, client)
    assert not caught.value.is_transient and client.paths[-1] == "/continue_generation"
    assert "version 7 from /weights/v000007" in str(caught.value)
    # What comes after it says less.
    with pytest.raises(InferenceError, match=words):
        trio.run(load_full, client)
    with pytest.raises(InferenceError, match="closed the connection"):
        trio.run(load_full, Client(continue_generation=DEAD))


def test_a_server_goes_on_where_its_update_is_given_up():
    async def hang(_):
        await trio.sleep_forever()

    class Slow(Client):
        async def post(self, path, *args, **settings):
            if path == "/update_weights_from_disk":
                await trio.sleep_forever()
            return await super().post(path, *args, **settings)

    async def main():
        client = Slow()
        with trio.move_on_after(0.01):
            await load_full(client)
        return client.paths

    assert trio.run(main) == ["/pause_generation", "/continue_generation"]


def test_adapters_have_new_names_and_the_old_one_goes():
    client = Client(unload_lora_adapter=[{}, Refused(400, {"error_message": "does not exist"}), DEAD])
    first, second = trio.run(load_adapter, client), trio.run(partial(load_adapter, client, 7, "rollouts-v6-1"))
    assert first != second and first.startswith("rollouts-v7-")
    assert client.sent("/load_lora_adapter")[0] == {"lora_name": first, "lora_path": "/weights/v000007"}
    assert client.sent("/unload_lora_adapter") == [{"lora_name": "rollouts-v6-1"}]
    trio.run(partial(load_adapter, client, 8, "evicted"))
    with pytest.raises(HTTPFailure):
        trio.run(partial(load_adapter, client, 9, "x"))


@pytest.mark.parametrize(
    ("failure", "is_transient"), [(Refused(400, {"error_message": "rank 16"}), False), (DEAD, True)]
)
def test_an_adapter_that_is_refused(failure, is_transient):
    with pytest.raises(InferenceError, match=r"version 7 in /weights/v000007: .*--max-lora-rank") as caught:
        trio.run(load_adapter, Client(load_lora_adapter=failure))
    assert caught.value.is_transient is is_transient


# --- torch.distributed ------------------------------------------------------------------------------------------------

INFOS = [
    TensorInfo("a", (2, 3), "float32", 1),  # 24 bytes
    TensorInfo("b", (4,), "torch.bfloat16", 2),  # 8
    TensorInfo("c", (100,), "float32", 3),
]


def test_a_server_receives_in_buckets_within_one_update():
    client, begun = Client(), []

    def receiving():
        begun.append(client.paths[-1])

    trio.run(partial(receive, client, INFOS, 7, name="g", bucket_bytes=32, receiving=receiving))
    received = "/update_weights_from_distributed"
    assert client.paths == [
        "/pause_generation",
        "/begin_weight_update",
        received,
        received,
        "/end_weight_update",
        "/continue_generation",
    ]
    assert begun == ["/begin_weight_update"]
    first, last = client.sent(received)
    assert (first["names"], first["dtypes"], first["shapes"]) == (["a", "b"], ["float32", "bfloat16"], [[2, 3], [4]])
    assert not first["flush_cache"] and first["weight_version"] is None
    assert last["names"] == ["c"] and last["flush_cache"] and last["weight_version"] == "7"
    assert first["group_name"] == last["group_name"] == "g"


def test_an_update_that_was_left_open_is_closed_first():
    client = Client(begin_weight_update=[Refused(400, {"message": "a weight-update session is already open"}), {}])
    trio.run(partial(receive, client, INFOS, 7, name="g"))
    assert client.paths[1:4] == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]


def test_a_broadcast_that_fails_is_final_and_the_server_goes_on():
    client = Client(update_weights_from_distributed=Refused(400, {"message": "Connection closed by peer"}))
    with pytest.raises(InferenceError, match=r"version 7 from the group 'g': .*closed by peer.*restart it") as caught:
        trio.run(partial(receive, client, INFOS, 7, name="g"))
    assert not caught.value.is_transient and client.paths[-1] == "/continue_generation"


def test_joining_and_leaving():
    client = Client(
        server_info=INFO, destroy_weights_update_group=[{}, Refused(400, {"message": "does not exist"}), DEAD]
    )
    assert trio.run(group_ranks, client) == 2
    place = GroupPlace("10.0.0.1", 29500, 3, "g", "gloo")
    trio.run(partial(join_group, client, place, rank=1))
    assert client.sent("/init_weights_update_group") == [
        {
            "master_address": "10.0.0.1",
            "master_port": 29500,
            "rank_offset": 1,
            "world_size": 3,
            "group_name": "g",
            "backend": "gloo",
        }
    ]
    trio.run(partial(leave_group, client, name="g"))
    trio.run(partial(leave_group, client, name="g"))
    with pytest.raises(HTTPFailure):
        trio.run(partial(leave_group, client, name="g"))
    with pytest.raises(InferenceError, match=r"did not join the group 'g' at 10\.0\.0\.1:29500"):
        trio.run(partial(join_group, Client(init_weights_update_group=DEAD), place))
    with pytest.raises(ConfigError, match="--dp-size 2"):
        trio.run(group_ranks, Client(server_info=INFO | {"dp_size": 2}))


# --- starting one -----------------------------------------------------------------------------------------------------


def flags_of(argv):
    return {flag: value for flag, value in zip(argv, [*argv[1:], ""], strict=True) if flag.startswith("--")}


def test_the_command_on_a_cpu():
    options = ServerOptions(context_tokens=4096, device="cpu", flags=("--max-running-requests", "8"))
    command = serve_sglang("/venv/bin/python", "org/model", 8123, options, lora_rank=8, seed=3)
    flags = flags_of(command.argv)
    assert command.argv[:3] == ["/venv/bin/python", "-m", "sglang.launch_server"]
    assert command.argv[-2:] == ["--max-running-requests", "8"] and command.ready_path == "/ready"
    assert flags["--host"] == "127.0.0.1" and flags["--port"] == "8123" and flags["--served-model-name"] == "policy"
    assert flags["--device"] == "cpu" and flags["--dtype"] == "float32" and flags["--context-length"] == "4096"
    assert flags["--lora-backend"] == "torch_native" and flags["--max-lora-rank"] == "8"
    assert flags["--attention-backend"] == "torch_native" and flags["--mem-fraction-static"] == "0.3"
    assert command.env == {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",
    }


def test_the_command_on_gpus(tmp_path):
    command = serve_sglang("python", str(tmp_path), 8123, ServerOptions(device="cuda", gpus="0,1", memory_share=0.5))
    flags = flags_of(command.argv)
    assert flags["--tp-size"] == "2" and flags["--mem-fraction-static"] == "0.5" and flags["--dtype"] == "auto"
    assert not {"--device", "--enable-lora", "--attention-backend", "--context-length"} & set(flags)
    assert command.env == {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}, "a folder needs no network"


def test_without_a_gpu_it_is_the_cpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "--device" in serve_sglang("python", "m", 1, ServerOptions()).argv


def test_settings_that_cannot_work_together():
    given = {"model": "tiny", "training": None, "seed": 0, "temperature": 1.0, "folder": "", "concurrency": 1}
    there = {"url": URL, "transport": "distributed"}
    with pytest.raises(ConfigError, match=r"--inference\.transport disk, or --lora-rank 0"):
        run_check(create_sglang_inference, given | {"lora_rank": 8}, there)
    run_check(create_sglang_inference, given | {"lora_rank": 0}, there)
    run_check(create_sglang_inference, given | {"lora_rank": 8}, {"url": URL})
