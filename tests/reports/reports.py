"""Public reports of wrong attention, as data: the case, the check that sees it, the code it must say.

Symptoms are in our words. `mutant` has the reported defect and is judged everywhere. `real` calls the installed
library as the report did; `here` says whether the defect is still there (`fails`), gone (`fixed`), or there in
another installed library than the report's or on another shape (`kin`). `gpu` names
the backends to judge on a CUDA machine: there the check may find nothing (fixed since) or the reported code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from attention.backends import create
from attention.backends.base import Backend
from attention.backends.oracle import OracleBackend
from attention.cases import AttentionCase
from attention.reasons import Code
from tests.reports import mutants as m
from tests.reports import real

REPOSITORIES = {
    "FlagAttention": "flagos-ai/FlagAttention",
    "Megatron-Bridge": "NVIDIA-NeMo/Megatron-Bridge",
    "SageAttention": "thu-ml/SageAttention",
    "TensorRT-LLM": "NVIDIA/TensorRT-LLM",
    "aiter": "ROCm/aiter",
    "exllamav3": "turboderp-org/exllamav3",
    "flash-attention": "Dao-AILab/flash-attention",
    "flashinfer": "flashinfer-ai/flashinfer",
    "imp": "kekzl/imp",
    "kvcached": "ovg-project/kvcached",
    "pytorch": "pytorch/pytorch",
    "sglang": "sgl-project/sglang",
    "transformers": "huggingface/transformers",
    "vllm": "vllm-project/vllm",
    "vllm-metal": "vllm-project/vllm-metal",
    "vllm-xpu-kernels": "vllm-project/vllm-xpu-kernels",
}


@dataclass(frozen=True)
class Report:
    """One public report as a runnable case."""

    id: str  # project#number, an issue or a pull request
    backends: str
    symptom: str
    check: str  # of attention.checks.CHECKS or EXTRA_CHECKS
    code: Code
    mutant: Callable[[], Backend]
    case: AttentionCase
    sound: Callable[[], Backend] = OracleBackend
    real: Callable[[], Backend] | None = None
    here: Literal["fails", "fixed", "kin"] | None = None
    gpu: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        project, number = self.id.split("#")
        return f"https://github.com/{REPOSITORIES[project]}/issues/{number}"

    @property
    def how(self) -> str:
        """How it runs: what the table prints."""
        parts = ["mutant"]
        if self.here is not None:
            parts.append({"fails": "fails here", "fixed": "fixed here", "kin": "its kin fails here"}[self.here])
        if self.gpu:
            parts.append("H200 (marked gpu)")
        return " + ".join(parts)


def case(batch: str = "q5s21_q1s18", **changes: Any) -> AttentionCase:
    """A tiny case: two members, neither of whole pages, two query heads a KV head."""
    fields: dict[str, Any] = {
        "phase": "extend",
        "heads_q": 4,
        "heads_kv": 2,
        "head_dim_qk": 16,
        "head_dim_vo": 16,
        "dtype": "float32",
        "page_size": 8,
    }
    return AttentionCase(batch=batch, **{**fields, **changes})


def half(batch: str = "q5s21_q1s18", **changes: Any) -> AttentionCase:
    """The same in bfloat16, with the head dim 64 and pages of 16 that GPU kernels take."""
    return case(batch, **{"dtype": "bfloat16", "head_dim_qk": 64, "head_dim_vo": 64, "page_size": 16, **changes})


def decode(batch: str = "q1s18_q1s33", **changes: Any) -> AttentionCase:
    return half(batch, phase="decode", **changes)


def runs_math_instead() -> Backend:
    """Named flash, executes math."""
    other = create("torch_sdpa:math")
    other.name = "torch_sdpa:flash"
    return other


def flash() -> Backend:
    return create("torch_sdpa:flash")


FLASH = ("flash_attn:fa2", "flash_attn:fa3", "flash_attn:fa4")
INFER = ("flashinfer:fa2", "flashinfer:fa3")

REPORTS: tuple[Report, ...] = (
    # --- the wrong or a silently changed backend
    Report(
        "vllm#50292",
        "vLLM 0.26 selector",
        "the variable that names the backend is no longer read: another one runs, without a warning",
        "confirmation",
        Code.UNCONFIRMED,
        runs_math_instead,
        case(),
        sound=flash,
    ),
    Report(
        "TensorRT-LLM#17698",
        "TensorRT-LLM VisualGen",
        "cross attention runs the plain backend although a fused one is configured",
        "confirmation",
        Code.UNCONFIRMED,
        runs_math_instead,
        case("q5s21", causal=False),
        sound=flash,
    ),
    Report(
        "transformers#46960",
        "PyTorch SDPA through transformers",
        "a shape that the fused kernels refuse falls to math: S x S memory, no word",
        "confirmation",
        Code.UNCONFIRMED,
        runs_math_instead,
        case(head_dim_vo=24),
        sound=lambda: create("torch_sdpa:math"),
        real=real.unrestricted,
        here="kin",
    ),
    Report(
        "vllm#40153",
        "vLLM FLASHINFER on SM120",
        "a model with attention sinks on a backend that takes none",
        "sinks",
        Code.SINK_IGNORED,
        m.SinkDropped,
        half(sinks=True),
        gpu=(*INFER, "flash_attn:fa3", "triton:paged"),
    ),
    Report(
        "sglang#23139",
        "SGLang flashinfer default",
        "the default puts sink models on a backend that takes no sinks",
        "sinks",
        Code.SINK_IGNORED,
        m.SinkDropped,
        decode(sinks=True),
        gpu=INFER,
    ),
    Report(
        "imp#658",
        "imp, head dim 256 on SM120",
        "a launch that needs too much shared memory fails, nobody looks, garbage comes out",
        "numeric",
        Code.NUMERIC_DRIFT,
        m.LaunchUnchecked,
        half("q1s18", head_dim_qk=256, head_dim_vo=256),
        gpu=(*FLASH, *INFER, "triton:paged"),
    ),
    # --- masks, windows, rows without keys
    Report(
        "pytorch#110144",
        "PyTorch SDPA, every kernel",
        "is_causal is aligned to the top left: a query after a cache sees the wrong keys",
        "causal_alignment",
        Code.CAUSAL_ALIGNMENT,
        m.TopLeftCausal,
        case("q2s6"),
        real=lambda: real.is_causal("math"),
        here="fails",
    ),
    Report(
        "SageAttention#372",
        "SageAttention",
        "causal with fewer queries than keys is aligned to the top left",
        "causal_alignment",
        Code.CAUSAL_ALIGNMENT,
        m.TopLeftCausal,
        case("q3s20_q9s9"),
        real=lambda: real.is_causal("flash"),
        here="kin",
    ),
    Report(
        "flash-attention#1778",
        "FlashAttention, more queries than keys",
        "the top rows see no key; they are zero by convention, and a backend that differs must say so",
        "empty_members",
        Code.EMPTY_ROW_SEMANTICS,
        m.EmptyRowIsNan,
        half("q7s4"),
        gpu=FLASH,
    ),
    Report(
        "flash-attention#2199",
        "FlashAttention window (32, 64)",
        "a window is relative to the bottom-right diagonal; read from the top left, rows come out empty",
        "window_edge",
        Code.NUMERIC_DRIFT,
        m.WindowFromTopLeft,
        half("q5s21", window=(4, 0)),
        gpu=FLASH,
    ),
    Report(
        "transformers#39408",
        "transformers sliding_window",
        "a window of W tokens counts the current one, a kernel's inclusive left window does not: one key off",
        "window_edge",
        Code.SWA_IGNORED,
        m.WindowOneTooNarrow,
        case("q5s21", window=(4, 0)),
        real=real.hf_window,
        here="fails",
    ),
    Report(
        "transformers#29623",
        "transformers with flash kernels",
        "the window passed as W instead of W - 1: one key too many",
        "window_edge",
        Code.SWA_IGNORED,
        m.WindowOneTooWide,
        case("q1s40", window=(7, 0)),
    ),
    Report(
        "sglang#26147",
        "SGLang",
        "the model's window and the kernel's differ by the current token",
        "window_edge",
        Code.SWA_IGNORED,
        m.WindowOneTooWide,
        case("q1s21_q1s9", window=(7, 0)),
    ),
    Report(
        "Megatron-Bridge#2656",
        "Megatron-Bridge",
        "the window of the checkpoint and that of the kernel differ by one",
        "window_edge",
        Code.SWA_IGNORED,
        m.WindowOneTooNarrow,
        case("q20", phase="prefill", window=(7, 0)),
    ),
    Report(
        "vllm#3385",
        "vLLM paged attention",
        "the window differs by one from the reference model's",
        "window_edge",
        Code.SWA_IGNORED,
        m.WindowOneTooWide,
        half("q9s30", window=(7, 0)),
        gpu=(*FLASH, *INFER, "triton:paged"),
    ),
    Report(
        "sglang#26516",
        "SGLang torch_native",
        "sliding_window is accepted and ignored",
        "window_edge",
        Code.SWA_IGNORED,
        m.WindowIgnored,
        case(window=(4, 0)),
    ),
    Report(
        "sglang#4823",
        "SGLang flashinfer, Gemma 3",
        "the layer knows its window, the backend does not: garbage once the context is longer",
        "window_edge",
        Code.SWA_IGNORED,
        m.WindowIgnored,
        case("q1s200", phase="decode", window=(31, 0)),
    ),
    Report(
        "vllm#51756",
        "vLLM, Gemma 3 without the hybrid KV manager",
        "the sliding window of some layers is applied to the global ones",
        "needles",
        Code.NUMERIC_DRIFT,
        m.WindowEverywhere,
        case("q1s40"),
    ),
    Report(
        "vllm#30887",
        "vLLM TRITON_ATTN, gpt-oss",
        "V tiles outside the window are not masked: what lies there leaks as NaN",
        "outside_window",
        Code.PAD_POISON,
        m.PoisonOutsideWindow,
        half("q3s70_q1s40"),
        gpu=("triton:paged", *FLASH, *INFER),
    ),
    Report(
        "vllm#47188",
        "vLLM TRITON_MLA, split KV with a window",
        "splits that the window leaves empty are merged from scratch memory",
        "numeric",
        Code.NUMERIC_DRIFT,
        m.EmptySplitsMerged,
        half("q1s200", phase="decode", window=(15, 0)),
        gpu=("triton:paged", *INFER),
    ),
    Report(
        "pytorch#103963",
        "PyTorch SDPA",
        "a row with every key masked is NaN, or not, by version",
        "empty_members",
        Code.EMPTY_ROW_SEMANTICS,
        m.EmptyRowIsNan,
        case("q7s4"),
        real=lambda: real.masked("math"),
        here="fixed",
    ),
    Report(
        "pytorch#110213",
        "PyTorch SDPA, mask of finfo.min",
        "a row masked with the lowest number, not -inf, attends to everything: the mean of V",
        "empty_members",
        Code.EMPTY_ROW_SEMANTICS,
        m.EmptyRowIsMean,
        case("q7s4"),
        real=lambda: real.masked("flash", lowest=True),
        here="fails",
    ),
    Report(
        "pytorch#101967",
        "PyTorch SDPA, math",
        "NaN in masked K or V poisons the output",
        "pad_poison",
        Code.PAD_POISON,
        m.PaddingLeaks,
        case(),
        real=lambda: real.masked("math", padded=True),
        here="fails",
    ),
    Report(
        "pytorch#141128",
        "PyTorch 2.5 SDPA flash on the CPU",
        "a NaN query leaves as zeros",
        "nan_query",
        Code.NUMERIC_DRIFT,
        m.NanBecomesZero,
        case("q8s8", causal=False),
        real=lambda: real.masked("flash"),
        here="fixed",
    ),
    Report(
        "pytorch#119131",
        "PyTorch SDPA math in float16",
        "scores beyond 65504 overflow where the fused kernels stay finite",
        "logit_range",
        Code.NUMERIC_DRIFT,
        m.ScoresInHalf,
        case(dtype="float16"),
        gpu=("torch_sdpa:math",),
    ),
    Report(
        "flashinfer#4451",
        "FlashInfer fa2, 0.6.16",
        "a row whose scores lie below -5e4 gives 0: the sentinel is no -inf",
        "logit_range",
        Code.NUMERIC_DRIFT,
        m.SentinelLogit,
        half("q1s1_q1s3"),
        gpu=INFER,
    ),
    Report(
        "flashinfer#4484",
        "FlashInfer",
        "output and LSE of a member without keys are undefined",
        "empty_members",
        Code.EMPTY_ROW_SEMANTICS,
        m.EmptyKvGarbage,
        decode(),
        gpu=INFER,
    ),
    Report(
        "flash-attention#2470",
        "FA4 on SM100",
        "a member without keys kills the process",
        "empty_members",
        Code.EMPTY_KV_UNSUPPORTED,
        m.EmptyKvRaises,
        half(),
        gpu=("flash_attn:fa4",),
    ),
    Report(
        "flash-attention#1155",
        "FA2 varlen",
        "a member without keys writes out of bounds, over the rows of its neighbour",
        "empty_members",
        Code.NUMERIC_DRIFT,
        m.ZeroLengthShiftsNext,
        half(),
        gpu=("flash_attn:fa2",),
    ),
    Report(
        "flash-attention#1537",
        "FA2 varlen, 9 over 3 heads",
        "a member of length zero in a batch of single queries is a shape error",
        "empty_members",
        Code.EMPTY_KV_UNSUPPORTED,
        m.ZeroLengthShapeError,
        decode(heads_q=9, heads_kv=3),
        gpu=("flash_attn:fa2",),
    ),
    Report(
        "flash-attention#1619",
        "FA2 varlen, 21 over 7 heads, head dim 120",
        "the same shape error with another group",
        "empty_members",
        Code.EMPTY_KV_UNSUPPORTED,
        m.ZeroLengthShapeError,
        decode(heads_q=21, heads_kv=7, head_dim_qk=120, head_dim_vo=120),
        gpu=("flash_attn:fa2",),
    ),
    # --- shapes, layouts, addresses
    Report(
        "exllamav3#316",
        "FA2 2.8.3, head dim 72",
        "two runs of the same inputs differ by 0.5",
        "repeatability",
        Code.NONDETERMINISTIC,
        m.Nondeterministic,
        half("q32", phase="prefill", heads_q=16, heads_kv=16, head_dim_qk=72, head_dim_vo=72, dtype="float16"),
        gpu=("flash_attn:fa2",),
    ),
    Report(
        "flash-attention#2665",
        "FA4 on SM100, head dim 256",
        "the strides of a transposed input are ignored",
        "strides",
        Code.STRIDE_UNSUPPORTED,
        m.StridesIgnored,
        half("q17", phase="prefill", heads_q=2, heads_kv=2, head_dim_qk=256, head_dim_vo=256),
        gpu=("flash_attn:fa4",),
    ),
    Report(
        "FlagAttention#45",
        "FlagAttention",
        "the first pointer to K is built with the strides of V, that to V with those of K",
        "strides",
        Code.STRIDE_UNSUPPORTED,
        m.StridesSwapped,
        case(),
    ),
    Report(
        "flashinfer#4044",
        "FlashInfer NVFP4 KV on SM120",
        "strided cache data is read as if it was dense",
        "strides",
        Code.STRIDE_UNSUPPORTED,
        m.StridesIgnored,
        decode(),
        gpu=INFER,
    ),
    Report(
        "flashinfer#4270",
        "FlashInfer cuDNN graph cache",
        "the key omits strides and dtype: a second layout of the same shape replays the first one's graph",
        "call_order",
        Code.NUMERIC_DRIFT,
        m.GraphOfFirstLayout,
        half(),
        gpu=("flashinfer:cudnn", "torch_sdpa:cudnn"),
    ),
    Report(
        "pytorch#191937",
        "PyTorch SDPA efficient",
        "wrong when K and V are expanded (stride 0) and kv_len % 32 == 1",
        "expand",
        Code.STRIDE_UNSUPPORTED,
        m.ExpandedResidueWrong,
        half("q4s33"),
        gpu=("torch_sdpa:efficient",),
    ),
    Report(
        "flashinfer#996",
        "FlashInfer CUDA-core decode",
        "group sizes 5, 6 and 7 have no kernel",
        "numeric",
        Code.GQA_RATIO_UNSUPPORTED,
        m.GqaRatioRefused,
        decode(heads_q=14, heads_kv=2, head_dim_qk=128, head_dim_vo=128),
        gpu=INFER,
    ),
    Report(
        "flashinfer#2896",
        "FlashInfer tensor-core decode, group 7",
        "28 over 4 heads (here 14 over 2, the same group) in bfloat16 give degenerate text",
        "numeric",
        Code.NUMERIC_DRIFT,
        m.GqaGroupRounded,
        decode("q1s256", heads_q=14, heads_kv=2, head_dim_qk=128, head_dim_vo=128),
        gpu=INFER,
    ),
    Report(
        "flashinfer#2986",
        "FlashInfer CUDA-core decode",
        "24 over 4 heads (here 12 over 2) have no kernel",
        "numeric",
        Code.GQA_RATIO_UNSUPPORTED,
        m.GqaRatioRefused,
        decode("q1s18", heads_q=12, heads_kv=2),
        gpu=INFER,
    ),
    Report(
        "flashinfer#4748",
        "FlashInfer NVFP4 KV, head dim 64",
        "a head dim that nobody tested has 53 % relative error",
        "numeric",
        Code.NUMERIC_DRIFT,
        m.CoarseValues,
        decode(),
    ),
    Report(
        "flashinfer#760",
        "FlashInfer fa2 and fa3 on a Hopper GPU",
        "the two kernels disagree for pages 1, 2, 3 with two keys in the last",
        "needles",
        Code.NUMERIC_DRIFT,
        m.LastPageOff,
        decode("q1s130", heads_q=4, heads_kv=4, head_dim_qk=128, head_dim_vo=128, page_size=64, layout="paged_hnd"),
        gpu=INFER,
    ),
    Report(
        "pytorch#163314",
        "FlexAttention, sliced BlockMask",
        "the mask of a decode step becomes a no-op",
        "numeric",
        Code.NUMERIC_DRIFT,
        m.MaskIgnored,
        case("q4s40", custom_mask=True),
        here="fixed",  # test_pytorch_163314_is_refused_by_the_installed_version
    ),
    Report(
        "vllm#50427",
        "vLLM FlexAttention, paged",
        "offsets of pages overflow 32 bits: a crash, or another page is read",
        "index_range",
        Code.INDEX_RANGE,
        m.PageOffsetInt32,
        decode("q1s2100k", heads_q=8, heads_kv=8, head_dim_qk=128, head_dim_vo=128),
        sound=flash,
    ),
    Report(
        "vllm#47671",
        "vLLM Triton decode",
        "page id times page stride overflows 32 bits from page 7.7k on",
        "index_range",
        Code.INDEX_RANGE,
        m.PageOffsetInt32,
        decode("q1s3700k", heads_q=1, heads_kv=1, head_dim_qk=576, head_dim_vo=512, page_size=480),
        sound=lambda: create("torch_sdpa:math"),
        gpu=("triton:paged",),
    ),
    Report(
        "aiter#4427",
        "AITER on ROCm",
        "strides overflow 32 bits: NaN, Inf or a fault",
        "index_range",
        Code.INDEX_RANGE,
        m.PageOffsetInt32,
        decode("9q1s256k", heads_q=16, heads_kv=8, head_dim_qk=128, head_dim_vo=128),
        sound=flash,
    ),
    Report(
        "vllm-xpu-kernels#445",
        "vLLM on XPU",
        "strides overflow 32 bits: NaN, Inf or a fault",
        "index_range",
        Code.INDEX_RANGE,
        m.PageOffsetInt32,
        decode("33q1s64k", heads_q=16, heads_kv=8, head_dim_qk=128, head_dim_vo=128, page_size=64),
        sound=flash,
    ),
    Report(
        "vllm#34570",
        "vLLM ROCm AITER",
        "head dim 32 on a kernel with a minimum of 64: no iteration, the output is uninitialised",
        "numeric",
        Code.NUMERIC_DRIFT,
        m.HeadDimBelowMinimum,
        case(head_dim_qk=32, head_dim_vo=32),
        gpu=("triton:paged", *FLASH),
    ),
    Report(
        "vllm#41656",
        "vLLM Triton, Gemma 4",
        "buffers are sized by the model's head dim, not the layer's",
        "numeric",
        Code.NUMERIC_DRIFT,
        m.HeadDimOfModel,
        case(head_dim_qk=32, head_dim_vo=32),
    ),
    Report(
        "vllm#37703",
        "vLLM TRITON_ATTN",
        "the setting for HND pages is not read",
        "numeric",
        Code.NUMERIC_DRIFT,
        m.LayoutIgnored,
        case("q5s16_q1s24", layout="paged_hnd"),
    ),
    Report(
        "kvcached#321",
        "kvcached with FlashInfer",
        "one side stores K and V as halves of the cache, the other as halves of every block",
        "numeric",
        Code.NUMERIC_DRIFT,
        m.KvHalvesSwapped,
        case(),
    ),
    Report(
        "sglang#15757",
        "SGLang, padded batches",
        "rows of padding hold NaN, and zero times NaN is NaN",
        "pad_poison",
        Code.PAD_POISON,
        m.PaddingOfVLeaks,
        case("q21", phase="prefill"),
        real=lambda: real.masked("flash", padded=True),
        here="kin",
    ),
    Report(
        "sglang#1779",
        "SGLang, reserved page",
        "the page that graphs pad with holds NaN in K",
        "pad_poison",
        Code.PAD_POISON,
        m.PaddingOfKLeaks,
        case("q1s21_q1s9", phase="decode"),
    ),
    Report(
        "vllm#53856",
        "vLLM, padded graphs",
        "slots past the end of a sequence leak",
        "pad_poison",
        Code.PAD_POISON,
        m.PaddingOfVLeaks,
        decode(),
        gpu=("triton:paged", *FLASH, *INFER),
    ),
    # --- softcap, scales, LSE, slopes
    Report(
        "sglang#33915",
        "SGLang flashinfer, Gemma 2",
        "logit_cap goes to a call that ignores it, since the cap is compiled in",
        "softcap",
        Code.SOFTCAP_IGNORED,
        m.SoftcapIgnored,
        half(softcap=50.0),
        gpu=(*INFER, "flash_attn:fa2", "triton:paged"),
    ),
    Report(
        "flashinfer#1193",
        "FlashInfer, grok-1",
        "GSM8K falls from 0.86 to 0.26: the cap of 30 is not applied",
        "softcap",
        Code.SOFTCAP_IGNORED,
        m.SoftcapIgnored,
        decode(softcap=30.0),
        gpu=INFER,
    ),
    Report(
        "vllm-metal#665",
        "vllm-metal",
        "the softcap is hard-coded to 0",
        "softcap",
        Code.SOFTCAP_IGNORED,
        m.SoftcapIgnored,
        case(softcap=50.0),
    ),
    Report(
        "flashinfer#1023",
        "FlashInfer paged prefill with LSE",
        "scales are lost among positional arguments",
        "kv_scales",
        Code.KV_SCALE_IGNORED,
        m.KvScaleIgnored,
        half(kv_dtype="float8_e4m3fn"),
        gpu=INFER,
    ),
    Report(
        "flashinfer#3509",
        "FlashInfer POD wrapper",
        "run() replaces what the caller passes by the values of its plan",
        "kv_scales",
        Code.KV_SCALE_IGNORED,
        m.VScaleIgnored,
        decode(kv_dtype="float8_e4m3fn"),
    ),
    Report(
        "flashinfer#2113",
        "FlashInfer",
        "the LSE is in base 2, that of FA3 in base e",
        "lse",
        Code.LSE_BASE,
        m.LseBase2,
        half(),
        gpu=INFER,
    ),
    Report(
        "sglang#40903",
        "SGLang, chunked prefix of MLA",
        "LSEs in base 2 are merged as natural logarithms: every hit of the prefix cache loses accuracy",
        "lse",
        Code.LSE_BASE,
        m.LseBase2,
        half("q3s70"),
        gpu=INFER,
    ),
    Report(
        "flashinfer#1606",
        "FlashInfer under tensor parallelism",
        "ALiBi slopes are computed from the local heads",
        "alibi",
        Code.NUMERIC_DRIFT,
        m.AlibiOfLocalHeads,
        case(alibi=True),
    ),
    # --- determinism, company, graphs
    Report(
        "vllm#41651",
        "vLLM FlashInfer, fp8 KV, CUDA graphs",
        "graphs give random output, eager does not",
        "graph_replay",
        Code.GRAPH_REPLAY_STALE,
        m.StaleGraph,
        decode(),
        gpu=(*INFER, "triton:paged"),
    ),
    Report(
        "vllm#54035",
        "FA3, fp8 KV",
        "decode and prefill disagree from KV length 97 on: tiles of 96 and 192",
        "equivalences",
        Code.NUMERIC_DRIFT,
        m.TileOf96,
        half("q1s97_q1s193", heads_q=2, heads_kv=1),
        gpu=("flash_attn:fa3", *INFER),
    ),
    Report(
        "vllm#51902",
        "vLLM batch-invariant mode on FA3",
        "a neighbour with one token more changes the bits of a decode",
        "batch_invariance",
        Code.BATCH_VARIANT,
        m.SplitsByCompany,
        decode("q1s200_q1s33", heads_q=14, heads_kv=2),
        gpu=("flash_attn:fa3", "triton:paged"),
    ),
    Report(
        "flashinfer#2424",
        "FlashInfer fa2",
        "the tile follows from the other members of the batch",
        "batch_invariance",
        Code.BATCH_VARIANT,
        m.SplitsByCompany,
        half(),
        gpu=("flashinfer:fa2",),
    ),
    Report(
        "flash-attention#2450",
        "FA3 with num_splits > 1",
        "the number of splits follows from the other members of the batch",
        "batch_invariance",
        Code.BATCH_VARIANT,
        m.SplitsByCompany,
        decode("q1s200"),
        gpu=("flash_attn:fa3",),
    ),
    Report(
        "vllm#23813",
        "FA3, fp8 KV, very long context",
        "accuracy falls with the length of the context",
        "numeric",
        Code.NUMERIC_DRIFT,
        m.CoarseAtLength,
        half("q1s500", heads_q=2, heads_kv=1),
    ),
    Report(
        "pytorch#193893",
        "cuDNN SDPA on B200, fewer than eight KV heads",
        "single rows are wrong: three tokens look fine, a benchmark loses 36 points",
        "numeric",
        Code.NUMERIC_DRIFT,
        m.FewKvHeadsGlitch,
        half("q40", phase="prefill", heads_q=8, heads_kv=4),
        gpu=("torch_sdpa:cudnn",),
    ),
    Report(
        "flashinfer#3864",
        "FlashInfer trtllm-gen on B200",
        "single rows are wrong at cosine 0.93; the mean does not show it",
        "numeric",
        Code.NUMERIC_DRIFT,
        m.OneRowWrong,
        half("q8s64"),
    ),
)
