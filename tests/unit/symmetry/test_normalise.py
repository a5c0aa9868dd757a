"""The normal form of a captured network computes what the network does, and knows few operations."""

import math

import pytest
import torch
from helpers import Program, outputs_of_graph
from torch import nn
from torch.nn import functional as F

from lightning_sym.symmetry.trace import trace_symmetry
from lightning_sym.symmetry.tracing.affine.translations import find_translations
from lightning_sym.symmetry.tracing.graph.calls import Call
from lightning_sym.symmetry.tracing.graph.capture import capture, operation_name, state_tensors
from lightning_sym.symmetry.tracing.labelling import rules
from lightning_sym.symmetry.tracing.labelling.rules import register_rule
from lightning_sym.symmetry.tracing.normal_form.normalise import normalise


def operations(captured):
    return {operation_name(node.target) for node in captured.graph.nodes if node.op == "call_function"}


# A linear layer, written in many ways.

LINEAR = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "matmul": lambda x, w, b: x @ w.T + b,
    "matmul of a transpose": lambda x, w, b: b + torch.matmul(x, w.transpose(0, 1)),
    "weight first": lambda x, w, b: (w @ x.transpose(-1, -2)).transpose(-1, -2) + b,
    "weight times columns": lambda x, w, b: torch.matmul(w, x[..., None])[..., 0] + b,
    "mm": lambda x, w, b: (x.reshape(-1, x.shape[-1]).mm(w.t()) + b).view(*x.shape[:-1], -1),
    "bmm": lambda x, w, b: torch.bmm(x, w.T.expand(x.shape[0], -1, -1)) + b,
    "addmm": lambda x, w, b: torch.addmm(b, x.flatten(0, -2), w.T).unflatten(0, x.shape[:-1]),
    "addmm with factors": lambda x, w, b: torch.addmm(b / 2, x.flatten(0, -2), w.T / 3, beta=2, alpha=3).unflatten(0,
        x.shape[:-1]),
    "baddbmm": lambda x, w, b: torch.baddbmm(b.expand(1, x.shape[1], len(b)), x, w.T[None].expand(len(x), -1, -1)),
    "mv": lambda x, w, b: torch.stack([torch.stack([torch.mv(w, t) + b for t in s]) for s in x]),
    "addmv": lambda x, w, b: torch.stack([torch.stack([torch.addmv(b, w, t) for t in s]) for s in x]),
    "tensordot": lambda x, w, b: torch.tensordot(x, w, ([-1], [1])) + b,
    "inner": lambda x, w, b: torch.inner(x, w) + b,
    "einsum": lambda x, w, b: torch.einsum("bti,oi->bto", x, w) + b,
    "einsum with dots": lambda x, w, b: torch.einsum("...i,oi->...o", x, w) + b,
    "einsum without arrow": lambda x, w, b: torch.einsum("bti,zi", x, w) + b,
    "einsum, weight first": lambda x, w, b: torch.einsum("oi,bti->obt", w, x).movedim(0, -1) + b,
    "einsum of three": lambda x, w, b: torch.einsum("bti,oi,o->bto", x, w, torch.ones_like(b)) + b,
    "product and sum": lambda x, w, b: (x.unsqueeze(-2) * w).sum(-1) + b,
    "product and kept sum": lambda x, w, b: (x.unsqueeze(-2) * w).sum(-1, keepdim=True).squeeze(-1) + b,
    "conv1d": lambda x, w, b: F.conv1d(x.mT, w[..., None], b).mT,
    "conv2d": lambda x, w, b: F.conv2d(x.mT[..., None], w[..., None, None], b)[..., 0].mT,
    "multi_dot": lambda x, w, b: (torch.linalg.multi_dot([x.flatten(0, 1), w.T,
        torch.eye(len(w), dtype=w.dtype)]).view(*x.shape[:-1], -1) + b),
    "written into": lambda x, w, b: (x @ w.T).add_(b),
    "viewed bias": lambda x, w, b: x @ w.T + b.view(1, 1, -1).expand(*x.shape[:-1], -1),
    "addcmul": lambda x, w, b: torch.addcmul(b, x @ w.T, torch.ones((), dtype=w.dtype)),
}  # fmt: skip
LINEAR |= {
    "beside one another": lambda x, w, b: torch.cat([F.linear(x, *part) for part in zip(w.split(1), b.split(1),
        strict=True)], -1),
    "added up": lambda x, w, b: sum(y @ v.T for y, v in zip(x.split((2, 3), -1), w.split((2, 3), 1), strict=True)) + b,
    "bias last": lambda x, w, b: F.conv1d(x.mT, w[..., None]).mT + b,
}  # fmt: skip
MOVES = {
    "view_as": lambda h: h.view_as(h),
    "expand_as": lambda h: h.expand_as(h),
    "permuted and back": lambda h: h.permute(2, 0, 1).permute(1, 2, 0),
    "chunks": lambda h: torch.cat(h.chunk(2, -1), -1),
    "slices": lambda h: torch.concat([h[..., :2], h[..., 2:]], -1),
    "stack": lambda h: torch.stack(list(h.unbind(1)), 1),
    "clone and to": lambda h: h.clone().to(h.dtype).contiguous(),
    "viewed in pieces": lambda h: h.view(*h.shape[:-1], 2, -1).flatten(-2),
}
OTHERS = {
    "var_mean": lambda h: torch.add(*torch.var_mean(h, -1, correction=0, keepdim=True)) + h,
    "std_mean": lambda h: torch.mul(*torch.std_mean(h, -1, keepdim=True)) + h,
    "var_mean of all": lambda h: sum(torch.var_mean(h)) + h,
    "addcdiv": lambda h: torch.addcdiv(h, h, 2 + h.square(), value=0.3),
    "rsub": lambda h: torch.rsub(h, h.tanh()),
    "rsub of a number": lambda h: 1 - h,
    "factor of a sum": lambda h: torch.add(h, h.tanh(), alpha=0.3) - torch.sub(h, h.sin(), alpha=2),
    "mean by a sum": lambda h: h + h.sum(-1, keepdim=True) / h.shape[-1] + h.sum() * (1 / h.numel()),
    "no mean": lambda h: h + h.sum(-1, keepdim=True) / 7,
    "mean by a product": lambda h: h + torch.einsum("btd,t->bd", h, torch.full((3,), 1 / 3, dtype=h.dtype))[:, None],
    "mean by a row": lambda h: h + torch.full((1, 3), 0.25, dtype=h.dtype) @ h,
    "mean by a column": lambda h: h + h @ torch.full((4,), 0.25, dtype=h.dtype)[:, None],
    "pooled": lambda h: (h + F.adaptive_avg_pool1d(h.mT, 1).mT + F.avg_pool1d(h.mT, 3).mT + F.avg_pool1d(h, 3, 1)[...,
        :1]),
    "mean of a transpose": lambda h: h + h.permute(2, 0, 1).mean((-1, 1)),
    "negatives": lambda h: (0 + h * 1) / 1 - (-h.tanh()) + (-h.sin()),
    "like others": lambda h: h + torch.ones_like(h) - h.new_full((4,), 2) + torch.full_like(h, 3) * h.new_zeros(4),
    "expanded": lambda h: h + h.mean(1, keepdim=True).expand_as(h) * h.mean(0).expand(*h.shape),
    "other names": lambda h: torch.true_divide(torch.multiply(h, h), torch.subtract(h.square(), -2)),
    "rounded quotient": lambda h: torch.divide(h, 0.7, rounding_mode="floor") + h,
    "seen after a write": lambda h: (torch.relu_(g := h * 1), g)[1] + h,
    "seen in a view": lambda h: (g := h * 1, g[..., 0].mul_(2), g)[2],
    "filled": lambda h: (g := torch.zeros_like(h), g.copy_(h), g)[2] + 1,
}  # fmt: skip


def two_layers(first, between=lambda h: h):
    def forward(s, x):
        return s.last(s.norm(between(first(x, s.a.weight, s.a.bias))))

    return Program(forward, {"a": nn.Linear(5, 4), "norm": nn.LayerNorm(4), "last": nn.Linear(4, 7)}).double()


# Attention, masked in many ways.

LOW = torch.finfo(torch.float32).min
MASKED = {
    "masked_fill": lambda z, m: z.masked_fill(~m, -math.inf),
    "masked_fill_": lambda z, m: z.masked_fill_(~m, -1e9),
    "masked_fill by a tensor": lambda z, m: z.masked_fill(m.logical_not(), torch.tensor(LOW, dtype=z.dtype)),
    "where": lambda z, m: torch.where(m, z, -math.inf),
    "where not": lambda z, m: torch.where(~m, torch.full((), LOW, dtype=z.dtype), z),
    "added": lambda z, m: z + torch.zeros(m.shape, dtype=z.dtype).masked_fill(~m, -math.inf),
    "subtracted": lambda z, m: z - 1e4 * (~m),
    "twice": lambda z, m: z.masked_fill(~m, -math.inf).masked_fill(~m, LOW),
    "and more added": lambda z, m: z.masked_fill(~m, -math.inf) + torch.arange(m.shape[-1]),
}
PRODUCTS = {
    "matmul": (lambda q, k: q @ k.mT, lambda w, v: (w @ v).transpose(1, 2)),
    "einsum": (lambda q, k: torch.einsum("bhqe,bhke->bhqk", q, k), lambda w, v: torch.einsum("bhqk,bhke->bqhe", w, v)),
    "bmm": (lambda q, k: torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).unflatten(0, q.shape[:2]),
        lambda w, v: torch.bmm(w.flatten(0, 1), v.flatten(0, 1)).unflatten(0, v.shape[:2]).transpose(1, 2)),
}  # fmt: skip


def attention(mask, products=PRODUCTS["matmul"], read=None):
    def forward(s, x):
        q, k, v = (layer(x).unflatten(-1, (2, 2)).transpose(1, 2) for layer in (s.q, s.k, s.v))
        m = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        m = m if read is None else m & read(x)
        return s.o(products[1](mask(products[0](q, k), m).softmax(-1), v).flatten(-2))

    return Program(forward, {**{name: nn.Linear(6, 4) for name in "qkv"}, "o": nn.Linear(4, 6)}).double()


def tables():
    """Yield embeddings in several spellings."""
    reads = {
        "embedding": lambda s, i: s.e(i) + s.p[: i.shape[1]],
        "index": lambda s, i: s.e.weight[i] + s.p[torch.arange(i.shape[1])],
        "index_select": lambda s, i: s.e.weight.index_select(0, i.flatten()).view(*i.shape, -1) + s.p.narrow(0, 0, 3),
        "one_hot": lambda s, i: F.one_hot(i, 9).to(s.p) @ s.e.weight + F.embedding(torch.arange(i.shape[1]), s.p),
        "backwards": lambda s, i: s.e(i) + s.p[torch.arange(2, -1, -1)],
    }
    for name, read in reads.items():
        parts = {"e": nn.Embedding(9, 4), "p": nn.Parameter(torch.randn(3, 4)), "b": nn.Linear(4, 5)}
        yield name, Program(lambda s, i, read=read: s.b(read(s, i).tanh()), parts).double()


def every_network():
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    for name, first in LINEAR.items():
        yield f"linear: {name}", two_layers(first), x
    for name, between in {**MOVES, **OTHERS}.items():
        yield name, two_layers(LINEAR["matmul"], between), x
    bilinear = {"a": nn.Linear(5, 4), "two": nn.Bilinear(4, 4, 3)}
    yield "bilinear", Program(lambda s, x: s.two(s.a(x), s.a(x.flip(0))), bilinear).double(), x
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    for name, mask in MASKED.items():
        yield f"mask: {name}", attention(mask), x
    for name, products in PRODUCTS.items():
        yield f"attention: {name}", attention(MASKED["where"], products), x
    for name, network in tables():
        yield f"table: {name}", network, torch.randint(9, (2, 3))
    yield "mask of the input", attention(MASKED["where"], read=lambda x: x[:, :1, None, :1] > -9), x
    yield "encoder", nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True).double().eval(), x


CASES = {name: (network, x) for name, network, x in every_network()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.few(2)
def test_the_normal_form_computes_the_same_with_few_operations(name):
    network, x = CASES[name]
    torch.manual_seed(0)
    with torch.no_grad():
        expected = network(x)
    captured = capture(network, Call.of(x, {}, None))
    marks = {mark.name for mark in captured.marks}
    before = outputs_of_graph(captured, network, [x])
    normal = normalise(captured)
    after = outputs_of_graph(normal, network, [x])
    captured.graph.lint()
    torch.testing.assert_close(before, [expected], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after, [expected], rtol=1e-12, atol=1e-12)
    assert all(mark.node in captured.graph.nodes for mark in captured.marks)
    assert {mark.name for mark in captured.marks} == marks
    written = {"addmm", "mm", "mv", "bmm", "baddbmm", "tensordot", "einsum", "addcmul", "stack", "view_as"}
    assert name == "bilinear" or written.isdisjoint(operations(normal))


def described(network, x):
    symmetry = trace_symmetry(network, x)
    return symmetry.dimension, symmetry.log10_permutations, symmetry.shifts


def same_for_all(networks, x):
    found = {name: described(network, x) for name, network in networks.items()}
    wanted = next(iter(found.values()))
    return {name: own for name, own in found.items() if own != wanted}


def test_linear_layers_agree_however_they_are_written():
    # Rows on the way are other values for each place of the sequence in `mv`; constant factors fix what they meet.
    others = {"mv", "addmv", "multi_dot", "addmm with factors", "einsum of three"}
    networks = {name: two_layers(first) for name, first in LINEAR.items() if name not in others}
    assert same_for_all(networks, torch.randn(2, 3, 5, dtype=torch.float64)) == {}


def centred(h):
    return h - h.mean(-1, keepdim=True)


def experts(products):
    """Two layers per expert, with all experts' weights in two parameters, weighted by a softmax."""
    parts = {
        "first": nn.Linear(5, 4),
        "w": nn.Parameter(torch.randn(3, 6, 4)),
        "v": nn.Parameter(torch.randn(3, 4, 6)),
        "gate": nn.Linear(4, 3),
    }
    return lambda: Program(lambda s, x: products(s, h := s.first(x), s.gate(h).softmax(-1)), parts)


def read_twice(norm):
    parts = {"first": nn.Linear(5, 6), "one": nn.Linear(6, 2), "two": nn.Linear(6, 2)}
    return lambda: Program(lambda s, x: s.one(norm(h := s.first(x))) + s.two(h), parts)


def in_parts(product):
    parts = {
        "a": nn.Linear(5, 4),
        "b": nn.Linear(5, 4),
        "w": nn.Parameter(torch.randn(4, 4)),
        "last": nn.Linear(4, 2),
    }
    return lambda: Program(lambda s, x: s.last(product(s.a(x), s.b(x), s.w)), parts)


def hidden(softmax):
    """Attention among the samples behind a causal mask, with biases."""
    parts = {name: nn.Linear(5, 4) for name in ("q", "k", "v")} | {"last": nn.Linear(4, 2)}
    mask = torch.ones(2, 2).tril()
    return lambda: Program(lambda s, x: s.last(softmax(s.q(x) @ s.k(x).mT, mask.to(x)) @ s.v(x)), parts)


# No network of the frozen corpus has the later spellings.
ALIKE = {
    "masked softmax": (
        hidden(lambda z, mask: z.masked_fill(mask == 0, -math.inf).softmax(-1)),
        hidden(lambda z, mask: z.masked_fill(mask == 0, -math.inf).softmax(-1).masked_fill(mask == 0, 0.0)),
        hidden(lambda z, mask: F.normalize(z.softmax(-1) * mask, p=1, dim=-1)),
        hidden(lambda z, mask: (z - (z.exp() * mask).sum(-1, True).log()).exp() * mask),
    ),
    "layer norm": (
        read_twice(lambda h: F.layer_norm(h, (6,))),
        read_twice(lambda h: F.layer_norm(centred(h), (6,))),
        read_twice(lambda h: F.rms_norm(centred(h), (6,), eps=1e-5)),
    ),
    "experts": (
        experts(lambda s, h, p: torch.einsum("bf,fdg,bfg->bd", p, s.v, torch.einsum("bd,fgd->bfg", h, s.w).relu())),
        experts(lambda s, h, p: sum(p[:, i, None] * F.linear(F.linear(h, s.w[i]).relu(), s.v[i]) for i in range(3))),
    ),
    "layers of parts": (
        in_parts(lambda one, two, w: F.linear(one, w) + F.linear(two, w)),
        in_parts(lambda one, two, w: F.linear(torch.cat([one, two], -1), torch.cat([w, w], 1))),
    ),
}


@pytest.mark.parametrize("name", ALIKE)
def test_rare_spellings_have_the_group_of_the_common_one(name):
    dimensions = [trace_symmetry(make().double(), torch.randn(2, 5)).dimension for make in ALIKE[name]]
    assert min(dimensions) == max(dimensions) > 0


def test_movements_that_end_where_they_began_do_nothing():
    networks = {name: two_layers(LINEAR["linear"], between) for name, between in MOVES.items()}
    assert same_for_all({"plain": two_layers(LINEAR["linear"]), **networks}, torch.randn(2, 3, 5).double()) == {}


def test_attention_agrees_however_it_is_masked():
    networks = {name: attention(mask) for name, mask in MASKED.items()}
    networks |= {name: attention(MASKED["where"], products) for name, products in PRODUCTS.items()}
    assert same_for_all(networks, torch.randn(2, 4, 6, dtype=torch.float64)) == {}
    assert described(networks["where"], torch.randn(2, 4, 6).double())[0] == 24


def test_a_mask_that_lets_something_through_is_no_mask():
    seen = attention(lambda z, m: z.masked_fill(~m, -2.0))
    assert described(seen, torch.randn(2, 4, 6).double())[0] == 20


def test_operations_of_users_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))
    called = []

    @register_rule("aten::addmm")
    def own(trace, added, one, two, **kwargs):
        called.append(trace.operation)
        return rules.unknown(trace, added, one, two)

    trace_symmetry(two_layers(LINEAR["addmm"]), torch.randn(2, 3, 5, dtype=torch.float64))
    assert called[0] == "addmm"
    captured = capture(network := two_layers(LINEAR["matmul"]), Call.of(torch.randn(2, 3, 5), {}, None))
    assert "matmul" in operations(normalise(captured, {"aten::linear"}))
    assert find_translations([captured], state_tensors(network))


BATCH_NORMS = {
    "by hand": lambda h, m, v, g, b: (h - m) / torch.sqrt(v + 1e-3) * g + b,
    "gain and bias later": lambda h, m, v, g, b: F.batch_norm(h.flatten(0, 1), m, v, eps=1e-3).view_as(h) * g + b,
    "without gain": lambda h, m, v, g, b: (h - m) * torch.rsqrt(v + 1e-3) + 0 * g.sum() + 0 * b.sum(),
}
NO_BATCH_NORMS = {
    "eps outside": lambda h, m, v, g, b: (h - m) / (torch.sqrt(v) + 1e-3) * g + b,
    "no root": lambda h, m, v, g, b: (h - m) / (v + 1e-3) * g + b,
    "another order": lambda h, m, v, g, b: (h - m) / torch.sqrt(v.flip(0) + 1e-3) * g + b,
    "mean behind": lambda h, m, v, g, b: (h / torch.sqrt(v + 1e-3) - m) * g + b,
}


@pytest.mark.parametrize("name", [*BATCH_NORMS, *NO_BATCH_NORMS])
def test_batch_norms_are_told_by_what_they_compute(name):
    spelled = (BATCH_NORMS | NO_BATCH_NORMS)[name]
    network = Program(
        lambda s, x: spelled(s.a(x), s.n.running_mean, s.n.running_var, s.n.weight, s.n.bias),
        {"a": nn.Linear(5, 4), "n": nn.BatchNorm1d(4)},
    )
    found = operations(normalise(capture(network.eval(), Call.of(torch.randn(2, 3, 5), {}, None))))
    assert ("batch_norm" in found) == (name in BATCH_NORMS)
