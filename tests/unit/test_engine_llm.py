"""LLM and the streams of text above the engine, with a kernel that is a Python model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import WordLevel

from megakernel.checkpoint import GenerationDefaults, Tokenizer
from megakernel.engine import Engine
from megakernel.errors import CapacityError, DeviceFault, InvalidRequest
from megakernel.llm import LLM
from megakernel.runtime import Runtime
from megakernel.sampling import SamplingParams
from megakernel.settings import read_settings
from megakernel.text import StoppingText
from tests.fake_device import VOCAB, FakeDevice, expected, fake_program
from tests.unit.test_engine import no_weights

pytestmark = pytest.mark.timeout(60)
LETTERS = [chr(ord("A") + i % 26) + chr(ord("a") + i // 26) for i in range(VOCAB)]  # token i is these two letters


def letters_tokenizer() -> Tokenizer:
    raw = RawTokenizer(WordLevel({text: i for i, text in enumerate(LETTERS)}, unk_token="Aa"))
    raw.decoder = ByteLevelDecoder()
    return Tokenizer(raw)


class FakeLLM(LLM):
    """An LLM whose engine runs the fake program."""

    def __init__(self, device: FakeDevice | None = None, tokenizer: Tokenizer | None = None, **sizes: int) -> None:
        self._settings = read_settings({})
        self.program = fake_program(**sizes)
        self.name = "fake"
        self.tokenizer = tokenizer
        self.generation = GenerationDefaults()
        self.engine = Engine(Runtime(self.program, device or FakeDevice(), no_weights))


@pytest.fixture
def llm() -> Iterator[FakeLLM]:
    with FakeLLM(FakeDevice(step_s=0.0005), letters_tokenizer()) as made:
        yield made


def greedy(count: int, **more) -> SamplingParams:
    return SamplingParams(max_tokens=count, **more)


def spelled(ids: list[int]) -> str:
    return "".join(LETTERS[i] for i in ids)


def test_outputs_come_in_the_order_of_prompts(llm: FakeLLM) -> None:
    prompts = [[1, 2], [3], "Ca", [5, 6, 7]]
    ids = [[1, 2], [3], [2], [5, 6, 7]]
    outputs = llm.generate(prompts, greedy(6))
    assert [o.index for o in outputs] == [0, 1, 2, 3]
    for output, prompt in zip(outputs, ids):
        assert list(output.token_ids) == expected(prompt, 6) and list(output.prompt_token_ids) == prompt
        assert output.text == spelled(expected(prompt, 6)) and output.finish_reason == "length"
        assert output.timings is not None and output.logprobs is None
    assert outputs[2].prompt == "Ca" and outputs[0].prompt is None


def test_one_prompt_in_every_form(llm: FakeLLM) -> None:
    for prompt in ("Ca", ["Ca"], [2], [[2]], (2,)):
        (output,) = llm.generate(prompt, greedy(3))
        assert list(output.token_ids) == expected([2], 3)


@pytest.mark.parametrize("bad", [[], [[]], ""])
def test_an_empty_prompt_is_refused(llm: FakeLLM, bad: list) -> None:
    with pytest.raises(InvalidRequest, match="prompt: expected"):
        llm.generate(bad)


@pytest.mark.parametrize("bad", [5, None, [1.7, 2.2], [["1", "2"]], [None], [[float("nan")]]])
def test_a_prompt_that_is_neither_text_nor_ids(llm: FakeLLM, bad: object) -> None:
    with pytest.raises(InvalidRequest, match="expected a text or token ids"):
        llm.generate(bad)  # type: ignore[call-overload]


@pytest.mark.parametrize("bad", [[SamplingParams()], {"max_tokens": 3}, 3, {}])
def test_params_of_another_type(llm: FakeLLM, bad: object) -> None:
    with pytest.raises(InvalidRequest, match="one SamplingParams"):
        llm.generate([1], bad)  # type: ignore[call-overload]


def test_streams_add_up_to_the_whole(llm: FakeLLM) -> None:
    texts, counts, reasons = ["", ""], [0, 0], [None, None]
    for output in llm.generate([[1], [2]], greedy(9), stream=True):
        texts[output.index] += output.delta
        counts[output.index] += 1
        reasons[output.index] = output.finish_reason
        assert output.text == texts[output.index]
    assert texts == [spelled(expected([i], 9)) for i in (1, 2)] and counts == [9, 9] and reasons == ["length"] * 2


def test_leaving_a_stream_cancels_it() -> None:
    with FakeLLM(FakeDevice(step_s=0.001), max_slots=1, max_context=4000) as llm:
        stream = llm.generate([1], greedy(3000), stream=True)
        assert next(stream).token_ids == tuple(expected([1], 1))
        stream.close()
        assert list(llm.generate([2], greedy(3))[0].token_ids) == expected([2], 3)


@pytest.mark.parametrize("offset", [0, 1])
def test_a_stop_text_may_begin_inside_a_token(llm: FakeLLM, offset: int) -> None:
    whole = spelled(expected([4], 12))
    stop = whole[6 + offset : 9 + offset]  # crosses tokens
    at = whole.index(stop)
    (output,) = llm.generate([4], greedy(12, stop=["nothing like it", stop]))
    assert output.text == whole[:at] and output.finish_reason == "stop"
    assert list(output.token_ids) == expected([4], 12)[: -(-(at + 3) // 2)]
    streamed = "".join(o.delta for o in llm.generate([4], greedy(12, stop=stop), stream=True))
    assert streamed == whole[:at]


def test_a_shape_has_no_text() -> None:
    with FakeLLM() as llm:
        (output,) = llm.generate([3], greedy(4))
        assert output.text == "" and len(output.token_ids) == 4
        stopping = greedy(1, stop="a")
        for call in (lambda: llm.generate("text"), lambda: llm.chat([]), lambda: llm.generate([1], stopping)):
            with pytest.raises(InvalidRequest, match="no tokenizer"):
                call()


def test_logprobs_come_beside_the_tokens(llm: FakeLLM) -> None:
    (output,) = llm.generate([3], greedy(4, logprobs=2))
    assert output.logprobs is not None and [t.id for t in output.logprobs] == list(output.token_ids)
    assert output.logprobs[0].logprob == -1.5 and len(output.logprobs[0].top) == 2


def test_a_fault_reaches_the_caller_and_the_next_call_works() -> None:
    device = FakeDevice()
    device.fault_at = {3}
    with FakeLLM(device) as llm:
        with pytest.raises(DeviceFault):
            llm.generate([3], greedy(9))
        assert list(llm.generate([3], greedy(9))[0].token_ids) == expected([3], 9)


def test_logits_have_limits(llm: FakeLLM) -> None:
    with pytest.raises(CapacityError, match="logits"):
        llm.logits([1] * 64)
    with pytest.raises(CapacityError, match="logits"):
        llm.logits([1, 2], start=2)
    with pytest.raises(InvalidRequest, match="logits"):
        llm.logits([VOCAB])
    assert llm.logits([1, 2, 3], start=1).shape == (2, VOCAB)
    assert list(llm.generate([3], greedy(9))[0].token_ids) == expected([3], 9)


# ---------------------------------------------------------------------------------------------- stop texts
@pytest.mark.parametrize(
    ("tokens", "stops", "text", "stopped"),
    [
        ([0, 1, 2], (), "AaBaCa", False),
        ([0, 1, 2], ("B",), "Aa", True),
        ([0, 1, 2], ("aB", "Ba"), "A", True),
        ([0, 1, 2], ("aX", "CaD"), "AaBaCa", False),  # held back, then given out at the end
        ([0, 0, 1], ("AaB",), "Aa", True),  # a false start inside a repeat
        ([0, 1], ("AaBaX",), "AaBa", False),
        ([], ("A",), "", False),
    ],
)
def test_stopping_text(tokens: list[int], stops: tuple[str, ...], text: str, stopped: bool) -> None:
    made = StoppingText(letters_tokenizer(), stops)
    parts = [made.push(t) for t in tokens] + [made.finish()]
    assert "".join(parts) == made.text == text and made.stopped is stopped


def test_text_that_may_become_a_stop_is_held_back() -> None:
    made = StoppingText(letters_tokenizer(), ("BaX",))
    assert [made.push(0), made.push(1), made.push(2), made.finish()] == ["Aa", "", "BaCa", ""]
