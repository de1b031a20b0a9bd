"""The forms in which models of the supported types are published: special tokens, layout, what a generation prompt adds.

The templates are written for these tests, after what the models' own render. Of what those do with tools, pictures and
documents nothing is here.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.fixtures.tiny_tokenizer import tiny_tokenizer


@dataclass(frozen=True)
class Form:
    name: str
    model_type: str
    template: str | None
    specials: tuple[str, ...]
    eos: str
    learnt: str  # of the question "2?" with the answer "two"
    both: (
        str | None
    )  # of that and "4?" with "four", in one conversation; None: lastAnswer alone can be proven
    thought: str | None = (
        None  # of the answer "<think>\nHm.\n</think>\n\ntwo"; None: not tried, or not provable
    )
    bos: str | None = None
    takes_white_space: tuple[str, ...] = ()  # special tokens with rstrip
    marks: tuple[str, ...] = field(default=())  # added tokens that are not special
    vocabulary: Literal["bytes", "pieces"] = "bytes"


def tokenizer_of(form: Form) -> Any:
    made = _pieces(form) if form.vocabulary == "pieces" else _bytes(form)
    backend = made.backend_tokenizer
    backend.add_tokens([AddedToken(one, normalized=False) for one in form.marks])
    backend.add_special_tokens(
        [AddedToken(one, rstrip=True, normalized=False, special=True) for one in form.takes_white_space]
    )
    made.chat_template = form.template
    return made


def _bytes(form: Form) -> Any:
    return tiny_tokenizer(None, specials=list(form.specials), eos_token=form.eos, bos_token=form.bos)


def _pieces(form: Form) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=_trained_pieces(form.specials),
        unk_token="<unk>",
        bos_token=form.bos,
        eos_token=form.eos,
    )


@functools.cache
def _trained_pieces(specials: tuple[str, ...]) -> Tokenizer:
    """As sentencepiece has it: words with a mark for the space before them, and bytes for what is no word."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", *specials, *letters], show_progress=False
    )
    words = "User Assistant : two four is the answer two four [INST] [/INST] user model"
    bpe.train_from_iterator([words, *(f"{one} {one}" for one in words.split())], trainer)
    written = json.loads(bpe.to_str())
    written["added_tokens"] = [one for one in written["added_tokens"] if one["content"] not in letters]
    return Tokenizer.from_str(json.dumps(written))


_CHATML = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_LLAMA4 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|header_start|>' + m.role + '<|header_end|>\n\n' + m.content + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\n\n' }}{% endif %}"
)
_LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)
_TEKKEN = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}"
    "{% elif m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
# Thoughts of earlier answers are left out. This one asks for an answer; the next begins its thought for it.
_R1 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'assistant' %}{% set said = m.content.split('</think>')[-1] %}"
    "{{ '<｜Assistant｜>' + said + '<｜end▁of▁sentence｜>' }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
_QWEN3 = (
    "{% set ns = namespace(asked=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role != 'assistant' %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% else %}{% set thought = '' %}{% set said = m.content %}{% if '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.asked and (loop.last or thought) %}"
    "{{ '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + said.lstrip('\n') }}"
    "{% else %}{{ '<|im_start|>assistant\n' + said }}{% endif %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
_PHI4 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
_SMOLLM3 = (
    "{{ '<|im_start|>system\n## Metadata\n\nToday: ' + strftime_now('%d %B %Y') + '\nReasoning: /think\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + m.content.lstrip('\n') + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_GRANITE = (
    "{% for m in messages %}"
    "{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
)
_COHERE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}"
    "{{ {'system': '<|SYSTEM_TOKEN|>', 'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}[m.role] }}"
    "{{ m.content | trim + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)
_COHERE2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}"
    "{% else %}{{ '<|START_OF_TURN_TOKEN|>' + ('<|USER_TOKEN|>' if m.role == 'user' else '<|SYSTEM_TOKEN|>') }}"
    "{{ m.content }}{% endif %}{{ '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)
_GLM = (
    "[gMASK]<sop>{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_GLM45 = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}"
    "{{ '<|assistant|>\n<think>' }}{% if parts|length > 1 %}{{ parts[0].split('<think>')[-1].strip() }}{% endif %}"
    "{{ '</think>\n' + parts[-1].strip() }}"
    "{% else %}{{ '<|' + m.role + '|>\n' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_GLM_Z1 = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|assistant|>\n' + m.content.split('</think>')[-1].strip() }}"
    "{% else %}{{ '<|' + m.role + '|>\n' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n<think>' }}{% endif %}"
)
_OLMO2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|assistant|>\n' + m.content + eos_token }}{% if not loop.last %}{{ '\n' }}{% endif %}"
    "{% else %}{{ '<|' + m.role + '|>\n' + m.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# Earlier answers are closed by another token than the last one.
_OLMO3 = (
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' + m.content }}{{ eos_token if loop.last else '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_EXAONE = (
    "{% for m in messages %}{{ '[|' + m.role + '|]\n' }}{% if m.role == 'assistant' %}"
    "{{ '<think>\n\n</think>\n\n' + m.content.split('</think>')[-1].strip() }}{% else %}{{ m.content }}{% endif %}"
    "{{ '[|endofturn|]\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[|assistant|]\n<think>\n\n</think>\n\n' }}{% endif %}"
)
_K_EXAONE = _EXAONE.replace("[|", "<|").replace("|]", "|>")
_ERNIE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ 'User: ' + m.content + '\n' }}"
    "{% elif m.role == 'assistant' %}{{ 'Assistant: ' + m.content + eos_token }}"
    "{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
_SEED = (
    "{% for m in messages %}{{ bos_token + m.role + '\n' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}"
)
_STARCODER2 = (
    "{{ bos_token }}{{ 'You write code.\n\n' }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '### Instruction\n' + m.content + '\n\n' }}"
    "{% else %}{{ '### Response\n' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response\n' }}{% endif %}"
)

_DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
_DEEPSEEK2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ 'User: ' + m.content + '\n\n' }}"
    "{% elif m.role == 'assistant' %}{{ 'Assistant: ' + m.content + eos_token }}"
    "{% else %}{{ m.content + '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_DOTS1 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|response|>' + m.content + '<|endofresponse|>' }}"
    "{% else %}{{ '<|userprompt|>' + m.content + '<|endofuserprompt|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|response|>' }}{% endif %}"
)
_HUNYUAN = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|hy_User|>' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '<|hy_Assistant|>' + m.content + eos_token }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|hy_Assistant|>' }}{% endif %}"
)
_HUNYUAN_MOE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|startoftext|>' + m.content + '<|extra_0|>' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + '<|eos|>' }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
_MINIMAX = (
    "]~!b[]~b]system\nYou help.[e~[\n{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ ']~b]ai\n' + m.content + '[e~[\n' }}{% else %}{{ ']~b]' + m.role + '\n' + m.content + '[e~[\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ ']~b]ai\n<think>\n' }}{% endif %}"
)
_APERTUS = (
    "{{ bos_token }}<|system_start|>You help.<|system_end|>{% for m in messages %}"
    "{{ '<|' + m.role + '_start|>' + m.content + '<|' + m.role + '_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant_start|>' }}{% endif %}"
)
_ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_HARMONY = (
    "<|start|>system<|message|>Reasoning: medium<|end|>{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THINK = ("<think>", "</think>")
_TURNS = ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>")
_GLM_TOKENS = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>")
_PLAIN = ("<|endoftext|>",)

FORMS = (
    Form(
        "Llama 3", "llama", _LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>", "two<|eot_id|>", "two<|eot_id|>four<|eot_id|>", bos="<|begin_of_text|>",
    ),
    Form(
        "Llama 4", "llama4_text", _LLAMA4,
        ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>"),
        "<|eot|>", "two<|eot|>", "two<|eot|>four<|eot|>", bos="<|begin_of_text|>",
    ),
    Form(
        "Llama 2", "llama", _LLAMA2, ("<s>", "</s>"), "</s>", "two </s>", "two </s>four </s>",
        bos="<s>", vocabulary="pieces",
    ),
    Form(
        "R1 distilled", "llama", _R1,
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        "<｜end▁of▁sentence｜>", "", None, "Hm.\n</think>\n\ntwo<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>", marks=_THINK,
    ),
    Form("DeepSeek V2", "deepseek_v2", _DEEPSEEK2, ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
         "<｜end▁of▁sentence｜>", " two<｜end▁of▁sentence｜>", " two<｜end▁of▁sentence｜> four<｜end▁of▁sentence｜>",
         bos="<｜begin▁of▁sentence｜>"),
    Form("dots.llm1", "dots1", _DOTS1, ("<|userprompt|>", "<|endofuserprompt|>", "<|response|>", "<|endofresponse|>"),
         "<|endofresponse|>", "two<|endofresponse|>", "two<|endofresponse|>four<|endofresponse|>"),
    Form("Hunyuan", "hunyuan_v1_dense", _HUNYUAN, ("<|hy_begin|>", "<|hy_end|>", "<|hy_User|>", "<|hy_Assistant|>"),
         "<|hy_end|>", "two<|hy_end|>", "two<|hy_end|>four<|hy_end|>", bos="<|hy_begin|>"),
    Form("Hunyuan A13B", "hunyuan_v1_moe", _HUNYUAN_MOE, ("<|startoftext|>", "<|extra_0|>", "<|eos|>"), "<|eos|>",
         "two<|eos|>", "two<|eos|>four<|eos|>"),
    Form("MiniMax M2", "minimax_m2", _MINIMAX, ("]~!b[", "]~b]", "[e~["), "[e~[", "", None, "Hm.\n</think>\n\ntwo[e~[",
         marks=_THINK),
    Form("Apertus", "apertus", _APERTUS,
         ("<s>", *(f"<|{who}_{end}|>" for who in ("system", "user", "assistant") for end in ("start", "end"))),
         "<|assistant_end|>", "two<|assistant_end|>", "two<|assistant_end|>four<|assistant_end|>", bos="<s>"),
    Form("Helium", "helium", None, ("<s>", "</s>"), "</s>", "two</s>", None),
    Form("Qwen1.5 of experts", "qwen2_moe", _CHATML, _IM, "<|im_end|>", "two<|im_end|>", "two<|im_end|>four<|im_end|>"),
    Form("DeepSeek V3", "deepseek_v3", _DEEPSEEK,
         ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
         "<｜end▁of▁sentence｜>", "two<｜end▁of▁sentence｜>", "two<｜end▁of▁sentence｜>four<｜end▁of▁sentence｜>",
         bos="<｜begin▁of▁sentence｜>"),
    Form("Mistral", "mistral", _MISTRAL, ("<s>", "</s>"), "</s>", "two</s>", "two</s>four</s>",
         bos="<s>", vocabulary="pieces"),
    Form("Mistral, later", "mistral", _TEKKEN,
         ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
         "</s>", "two</s>", "two</s>four</s>", bos="<s>"),
    Form("Mixtral", "mixtral", _MISTRAL, ("<s>", "</s>"), "</s>", "two</s>", "two</s>four</s>",
         bos="<s>", vocabulary="pieces"),
    Form("Ministral", "ministral", _TEKKEN,
         ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
         "</s>", "two</s>", "two</s>four</s>", bos="<s>"),
    Form("Ministral 3", "ministral3", _TEKKEN,
         ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
         "</s>", "two</s>", "two</s>four</s>", bos="<s>"),
    Form("Gemma 4", "gemma4_text", _GEMMA.replace("<start_of_turn>", "<|turn>").replace("<end_of_turn>", "<turn|>"),
         ("<bos>", "<eos>", "<pad>", "<|turn>", "<turn|>"), "<turn|>", "two<turn|>", "two<turn|>four<turn|>", bos="<bos>"),
    Form("Qwen2.5", "qwen2", _CHATML, _IM, "<|im_end|>", "two<|im_end|>", "two<|im_end|>four<|im_end|>",
         "<think>\nHm.\n</think>\n\ntwo<|im_end|>"),
    Form("Qwen3", "qwen3", _QWEN3, _IM, "<|im_end|>", "<think>\n\n</think>\n\ntwo<|im_end|>", None,
         "<think>\nHm.\n</think>\n\ntwo<|im_end|>", marks=_THINK),
    Form("Qwen3 30B", "qwen3_moe", _QWEN3, _IM, "<|im_end|>", "<think>\n\n</think>\n\ntwo<|im_end|>", None,
         "<think>\nHm.\n</think>\n\ntwo<|im_end|>", marks=_THINK),
    Form("Qwen3 30B, later", "qwen3_moe", _CHATML, _IM, "<|im_end|>", "two<|im_end|>", "two<|im_end|>four<|im_end|>"),
    Form("Qwen3-Next", "qwen3_next", _CHATML, _IM, "<|im_end|>", "two<|im_end|>", "two<|im_end|>four<|im_end|>"),
    Form("Qwen3 Thinking", "qwen3", _QWEN3.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}"),
         _IM, "<|im_end|>", "\n</think>\n\ntwo<|im_end|>", None, "Hm.\n</think>\n\ntwo<|im_end|>", marks=_THINK),
    *(
        Form(name, model_type, _GEMMA, ("<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>"), "<eos>",
             "two<end_of_turn>", "two<end_of_turn>four<end_of_turn>", bos="<bos>")
        for name, model_type in (
            ("Gemma", "gemma"), ("Gemma 2", "gemma2"), ("Gemma 3", "gemma3_text"), ("Gemma 3n", "gemma3n_text"),
        )
    ),
    Form("Phi-3", "phi3", _PHI3, ("<s>", "<|endoftext|>"), "<|endoftext|>", "two<|end|>", "two<|end|>four<|end|>",
         bos="<s>", takes_white_space=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), vocabulary="pieces"),
    Form("Phi-4", "phi3", _PHI4, (*_IM, "<|im_sep|>"), "<|im_end|>", "two<|im_end|>", "two<|im_end|>four<|im_end|>"),
    Form("SmolLM3", "smollm3", _SMOLLM3, _IM, "<|im_end|>", "two<|im_end|>", "two<|im_end|>four<|im_end|>",
         "<think>\nHm.\n</think>\n\ntwo<|im_end|>", marks=_THINK),
    Form("Pythia", "gpt_neox", None, _PLAIN, "<|endoftext|>", "two<|endoftext|>", None),
    Form("GPT-2", "gpt2", None, _PLAIN, "<|endoftext|>", "two<|endoftext|>", None),
    Form("gpt-oss", "gpt_oss", _HARMONY, ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"), "<|return|>",
         "<|channel|>final<|message|>two<|return|>",
         "<|channel|>final<|message|>two<|end|><|channel|>final<|message|>four<|return|>"),
    Form("StarCoder", "gpt_bigcode", None, (*_PLAIN, "<fim_prefix>"), "<|endoftext|>", "two<|endoftext|>", None),
    Form("Granite 3", "granite", _GRANITE, ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
         "<|end_of_text|>", "two<|end_of_text|>", "two<|end_of_text|>four<|end_of_text|>"),
    Form("Granite 3 of experts", "granitemoe", _GRANITE, ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
         "<|end_of_text|>", "two<|end_of_text|>", "two<|end_of_text|>four<|end_of_text|>"),
    Form("Granite of experts, one shared", "granitemoeshared", _GRANITE,
         ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
         "<|end_of_text|>", "two<|end_of_text|>", "two<|end_of_text|>four<|end_of_text|>"),
    Form("Granite 4", "granitemoehybrid", _GRANITE, ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
         "<|end_of_text|>", "two<|end_of_text|>", "two<|end_of_text|>four<|end_of_text|>"),
    Form("Command R", "cohere", _COHERE, ("<BOS_TOKEN>", *_TURNS, "<|CHATBOT_TOKEN|>"), "<|END_OF_TURN_TOKEN|>",
         "two<|END_OF_TURN_TOKEN|>", "two<|END_OF_TURN_TOKEN|>four<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>"),
    Form("Command R7B", "cohere2", _COHERE2,
         ("<BOS_TOKEN>", *_TURNS, "<|CHATBOT_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
         "<|END_OF_TURN_TOKEN|>", "<|START_RESPONSE|>two<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
         "<|START_RESPONSE|>two<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
         "<|START_RESPONSE|>four<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>"),
    Form("GLM-4", "glm", _GLM.replace("'<|assistant|>' }}", "'<|assistant|>\n' }}"), _GLM_TOKENS, "<|endoftext|>",
         "two<|user|>", "two<|user|>four<|user|>"),
    Form("GLM-4 0414", "glm4", _GLM, _GLM_TOKENS, "<|endoftext|>", "\ntwo<|user|>", "\ntwo<|user|>\nfour<|user|>"),
    Form("GLM-4.5", "glm4_moe", _GLM45, _GLM_TOKENS, "<|endoftext|>", "\n<think></think>\ntwo<|user|>",
         "\n<think></think>\ntwo<|user|>\n<think></think>\nfour<|user|>", marks=_THINK),
    Form("GLM-4.7 Flash", "glm4_moe_lite", _GLM45, _GLM_TOKENS, "<|endoftext|>", "\n<think></think>\ntwo<|user|>",
         "\n<think></think>\ntwo<|user|>\n<think></think>\nfour<|user|>", marks=_THINK),
    Form("GLM-Z1", "glm4", _GLM_Z1, _GLM_TOKENS, "<|endoftext|>", "", None, "\nHm.\n</think>\n\ntwo<|user|>",
         marks=_THINK),
    Form("OLMo 2", "olmo2", _OLMO2, _PLAIN, "<|endoftext|>", "two<|endoftext|>",
         "two<|endoftext|>four<|endoftext|>", bos="<|endoftext|>"),
    Form("OLMoE", "olmoe", _OLMO2, _PLAIN, "<|endoftext|>", "two<|endoftext|>",
         "two<|endoftext|>four<|endoftext|>", bos="<|endoftext|>"),
    Form("OLMo 3", "olmo3", _OLMO3, _IM, "<|endoftext|>", "two<|endoftext|>", "two<|im_end|>four<|endoftext|>"),
    Form("OLMo 3 Think", "olmo3", _OLMO3.replace("assistant\n' }}{% endif %}", "assistant\n<think>' }}{% endif %}"),
         _IM, "<|endoftext|>", "", None, "\nHm.\n</think>\n\ntwo<|endoftext|>"),
    Form("EXAONE 4", "exaone4", _EXAONE, ("[BOS]", "[|system|]", "[|user|]", "[|assistant|]", "[|endofturn|]"),
         "[|endofturn|]", "two[|endofturn|]", "two[|endofturn|]four[|endofturn|]", bos="[BOS]", marks=_THINK),
    Form("Qwen3.5", "qwen3_5_text", _QWEN3.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}"),
         _IM, "<|im_end|>", "\n</think>\n\ntwo<|im_end|>", None, "Hm.\n</think>\n\ntwo<|im_end|>", marks=_THINK),
    Form("Qwen3.5 of experts", "qwen3_5_moe_text",
         _QWEN3.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}"),
         _IM, "<|im_end|>", "\n</think>\n\ntwo<|im_end|>", None, "Hm.\n</think>\n\ntwo<|im_end|>", marks=_THINK),
    Form("Qwen3.5, small", "qwen3_5_text",
         _QWEN3.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n\n</think>\n\n' }}{% endif %}"),
         _IM, "<|im_end|>", "two<|im_end|>", None, marks=_THINK),
    Form("LFM2", "lfm2", "{{ bos_token }}" + _CHATML, ("<|startoftext|>", *_IM), "<|im_end|>", "two<|im_end|>",
         "two<|im_end|>four<|im_end|>", bos="<|startoftext|>"),
    Form("LFM2 of experts", "lfm2_moe", "{{ bos_token }}" + _CHATML, ("<|startoftext|>", *_IM), "<|im_end|>",
         "two<|im_end|>", "two<|im_end|>four<|im_end|>", bos="<|startoftext|>"),
    Form("AFM", "arcee", "{{ bos_token }}" + _CHATML, ("<|begin_of_text|>", *_IM), "<|im_end|>", "two<|im_end|>",
         "two<|im_end|>four<|im_end|>", bos="<|begin_of_text|>"),
    Form("ERNIE 4.5", "ernie4_5", _ERNIE, ("<|begin_of_sentence|>", "</s>"), "</s>", "two</s>", "two</s>four</s>",
         bos="<|begin_of_sentence|>", vocabulary="pieces"),
    Form("ERNIE 4.5 of experts", "ernie4_5_moe", _ERNIE, ("<|begin_of_sentence|>", "</s>"), "</s>", "two</s>",
         "two</s>four</s>", bos="<|begin_of_sentence|>", vocabulary="pieces"),
    Form("Seed-OSS", "seed_oss", _SEED, ("<seed:bos>", "<seed:eos>", "<seed:think>", "</seed:think>"), "<seed:eos>",
         "two<seed:eos>", "two<seed:eos>four<seed:eos>", bos="<seed:bos>"),
    Form("Phi-2", "phi", None, _PLAIN, "<|endoftext|>", "two<|endoftext|>", None),
    Form("Phi-3.5 of experts", "phimoe", _PHI3, ("<s>", "<|endoftext|>"), "<|endoftext|>", "two<|end|>",
         "two<|end|>four<|end|>", bos="<s>", takes_white_space=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
         vocabulary="pieces"),
    Form("StableLM 2 Zephyr", "stablelm", _ZEPHYR, _PLAIN, "<|endoftext|>", "two<|endoftext|>",
         "two<|endoftext|>four<|endoftext|>"),
    Form("Minitron", "nemotron", None, ("<s>", "</s>"), "</s>", "two</s>", None, bos="<s>"),
    Form("OLMo", "olmo", None, _PLAIN, "<|endoftext|>", "two<|endoftext|>", None),
    Form("OLMo Instruct", "olmo", _OLMO2, _PLAIN, "<|endoftext|>", "two<|endoftext|>",
         "two<|endoftext|>four<|endoftext|>", bos="<|endoftext|>"),
    Form("FlexOlmo", "flex_olmo", None, _PLAIN, "<|endoftext|>", "two<|endoftext|>", None),
    Form("VaultGemma", "vaultgemma", None, ("<bos>", "<eos>"), "<eos>", "two<eos>", None, bos="<bos>"),
    Form("Trinity", "afmoe", "{{ bos_token }}" + _CHATML, ("<|begin_of_text|>", *_IM), "<|im_end|>", "two<|im_end|>",
         "two<|im_end|>four<|im_end|>", bos="<|begin_of_text|>"),
    Form("K-EXAONE", "exaone_moe", _K_EXAONE, ("[BOS]", "<|system|>", "<|user|>", "<|assistant|>", "<|endofturn|>"),
         "<|endofturn|>", "two<|endofturn|>", "two<|endofturn|>four<|endofturn|>", bos="[BOS]", marks=_THINK),
    Form("Falcon-H1", "falcon_h1", "{{ bos_token }}" + _CHATML, ("<|begin_of_text|>", "<|end_of_text|>", *_IM),
         "<|end_of_text|>", "two<|im_end|>", "two<|im_end|>four<|im_end|>", bos="<|begin_of_text|>"),
    Form("Nemotron-H", "nemotron_h", None, ("<s>", "</s>"), "</s>", "two</s>", None, bos="<s>"),
    Form("StarCoder2", "starcoder2", None, _PLAIN, "<|endoftext|>", "two<|endoftext|>", None),
    Form("StarCoder2 Instruct", "starcoder2", _STARCODER2, _PLAIN, "<|endoftext|>", "two<|endoftext|>",
         "two<|endoftext|>four<|endoftext|>", bos="<|endoftext|>"),
)  # fmt: skip
# Types that are published in one form: it is tried once.
DISTINCT = tuple({replace(form, name="", model_type=""): form for form in reversed(FORMS)}.values())[::-1]
