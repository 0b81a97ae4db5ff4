"""``generate`` with its cache on a merged model, against the whole sequence read anew at every step."""

import torch

from lsp_core.merging import merge_model

PROMPT, STEPS = 5, 8


@torch.no_grad()
def test_generate_follows_the_largest_logit(generating):
    """In float32 every token is the argmax; in bfloat16, where logits tie, within four roundings of the largest."""
    case = generating
    model = case.copy_model()
    merge_model(model, case.units, case.perturbed())
    prompt = case.examples[:3, :PROMPT]
    ids = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=STEPS, do_sample=False, use_cache=True
    )
    beside = case.family.kind == "seq2seq"
    known = 1 if beside else PROMPT  # tokens that were there before the first step
    assert ids.shape == (3, known + STEPS)
    for step in range(known, known + STEPS):
        arguments = (
            {"input_ids": prompt, "decoder_input_ids": ids[:, :step]} if beside else {"input_ids": ids[:, :step]}
        )
        logits = model(**arguments, use_cache=False).logits[:, -1]
        chosen = logits.gather(1, ids[:, step, None])[:, 0]
        if case.dtype == torch.float32:
            assert torch.equal(ids[:, step], logits.argmax(-1))
        slack = 0 if case.dtype == torch.float32 else 4 * torch.finfo(case.dtype).eps * logits.abs().amax(-1)
        assert (chosen >= logits.amax(-1) - slack).all()
