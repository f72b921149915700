"""The second run of a layer finds what the first one found."""

import random
from collections import OrderedDict, defaultdict, namedtuple
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

import stronghold
from stronghold.engine.arguments import fill, flatten
from stronghold.engine.copying import is_generator, structural_copy
from stronghold.engine.forward_hooks import ForwardHooks
from stronghold.engine.places import ModulePlaces
from stronghold.engine.replay import State
from stronghold.errors import OffloadedModelError
from tests.small import Cache, assert_close

Pair = namedtuple("Pair", ["one", "other"])


@dataclass
class Data:
    tensor: Tensor
    items: list = field(default_factory=list)


def test_containers_are_copied_and_tensors_shared():
    tensor, module = torch.randn(3), nn.Linear(2, 2)
    value = {
        "list": [tensor, (tensor, 1)],
        "pair": Pair(tensor, {"deep": [tensor]}),
        "ordered": OrderedDict(a=tensor),
        "default": defaultdict(list, b=[tensor]),
        "set": {1, 2},
        "module": module,
        "data": Data(tensor, [1]),
    }
    copied = structural_copy(value)
    assert copied["list"][0] is copied["list"][1][0] is copied["pair"].one is tensor
    assert copied["module"] is module
    assert type(copied["ordered"]) is OrderedDict
    assert type(copied["default"]) is defaultdict
    assert copied["default"].default_factory is list
    copied["list"].append(1)
    copied["pair"].other["deep"].clear()
    copied["default"]["b"].clear()
    copied["set"].add(3)
    copied["data"].items.append(2)
    assert len(value["list"]) == 2
    assert value["pair"].other["deep"] == [tensor]
    assert value["default"]["b"] == [tensor]
    assert value["set"] == {1, 2}
    assert value["data"].items == [1]


def test_a_cache_that_is_filled_leaves_its_copy_as_it_was():
    cache = Cache()
    cache.update(0, torch.zeros(1, 1))
    copied = structural_copy(cache)
    cache.update(0, torch.ones(1, 1))
    assert (copied.calls, len(copied.keys[0])) == (1, 1)


def test_what_refers_to_itself_is_copied_once():
    value = [1]
    value.append(value)
    copied = structural_copy(value)
    assert copied[1] is copied is not value
    data = Data(torch.zeros(1))
    data.items = [data]
    copied = structural_copy(data)
    assert copied.items[0] is copied is not data


def test_tensors_are_mapped_where_asked():
    copied = structural_copy([torch.ones(2), {"x": torch.ones(3)}], lambda t: t * 2)
    assert_close([copied[0], copied[1]["x"]], [torch.full((2,), 2.0), torch.full((3,), 2.0)])


def test_what_cannot_be_copied_is_shared():
    class Demanding:
        def __new__(cls, needed):
            return super().__new__(cls)

    generator, demanding = (i for i in range(3)), Demanding(1)
    function = lambda: None  # noqa: E731
    values = [generator, demanding, function, torch.float32, torch.Generator(), len]
    assert all(a is b for a, b in zip(structural_copy(values), values, strict=True))


def test_private_slots_are_copied_under_the_name_of_the_class_that_declares_them():
    class _Base:
        __slots__ = ("__own", "open")

        def __init__(self, own):
            self.__own, self.open = own, 1

        def own(self):
            return self.__own

    class Derived(_Base):
        __slots__ = "__own"

        def __init__(self, own, other):
            super().__init__(own)
            self.__own = other

        def both(self):
            return self.own(), self.__own

    one, other = torch.zeros(2), [1]
    copied = structural_copy(Derived(one, other))
    assert copied.both()[0] is one and copied.both()[1] == other and copied.both()[1] is not other
    assert copied.open == 1


def test_random_numbers_of_the_system_have_no_state_to_copy():
    generator = random.SystemRandom()
    assert not is_generator(generator) and is_generator(random.Random())
    tensors = []
    given, *_ = fill(flatten(([generator],), tensors), tuple(tensors))
    assert 0 <= given[0].random() < 1


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.register_buffer("grown", torch.zeros(2, 2))
        self.register_buffer("replaced", torch.zeros(2, 2))
        self.register_buffer("quiet", torch.zeros(2, 2))
        self.count, self.seen, self.names, self.kept = 0, [], {"a": 1}, {1}
        self.plain, self.loss, self.graphs = torch.zeros(2, 2), None, []

    def forward(self, x):
        """Returns what it found; changes all of it."""
        found = (
            *(b.clone() for b in self.buffers()),
            self.plain.clone(),
            self.count,
            list(self.seen),
            dict(self.names),
            set(self.kept),
            hasattr(self, "late"),
        )
        self.inner(x)
        self.grown += 1
        self.replaced = self.replaced + 1
        self.plain.add_(1)
        self.count += 1
        self.seen.append(self.count)
        self.names["b"] = self.count
        self.kept.add(self.count + 1)
        self.loss = x.sum()
        self.graphs.append(x.mean())
        self.late = True
        return found


def everything(module):
    buffers = [b.clone() for b in module.buffers()]
    attributes = [list(module.seen), dict(module.names), set(module.kept), module.late]
    return [*buffers, module.plain.clone(), module.count, *attributes]


def test_the_second_run_finds_the_state_of_the_first_and_leaves_no_trace():
    torch.manual_seed(0)
    module, x = Stateful(), torch.randn(4, 2, requires_grad=True)
    state = State(ModulePlaces(module))
    first = module(x)
    state.ran()
    module(x * 2)  # another run in between
    after, seen, loss, graphs = everything(module), module.seen, module.loss, list(module.graphs)
    quiet = module.quiet
    for _ in range(2):
        with state.again():
            assert_close(module(x), first)
    assert_close(everything(module), after)
    assert module.seen is seen
    assert module.loss is loss
    assert [a is b for a, b in zip(module.graphs, graphs, strict=False)] == [True, True]
    assert module.quiet is quiet


@pytest.mark.parametrize("values", [[3], [3, 3]])
def test_a_number_in_whose_place_an_equal_tensor_came_is_told_from_it(values):
    module = nn.Linear(1, 1)
    module.count, places = 3, ModulePlaces(module)
    state = State(places)
    module.count = torch.tensor(values)
    state.ran()
    with state.again():
        assert type(module.count) is int

    state = State(places)
    module.count.add_(1)
    state.ran()
    with state.again():
        assert module.count.tolist() == values
    assert module.count.tolist() == [value + 1 for value in values]


def test_an_attribute_that_the_first_run_made_is_absent_again():
    class Late(nn.Module):
        def forward(self):
            if hasattr(self, "made"):
                return "found"
            self.made = 3
            return "made"

    module = Late()
    state = State(ModulePlaces(module))
    assert module() == "made"
    state.ran()
    with state.again():
        assert module() == "made"
    assert module.made == 3


def test_a_run_that_fails_restores_the_state_all_the_same():
    module = Stateful()
    state = State(ModulePlaces(module))
    module(torch.randn(4, 2))
    state.ran()
    after = everything(module)
    try:
        with state.again():
            module(torch.randn(4, 2))
            raise KeyError
    except KeyError:
        pass
    assert_close(everything(module), after)


def _doubled(output):
    output.mul_(2)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.other(self.one(x))


def test_hooks_that_look_run_once_and_hooks_that_change_run_twice():
    module, calls, looked = Two(), [], []

    def note(name, result=None):
        if result is None:
            return lambda module, *rest: looked.append(name)

        def hook(module, *rest):
            calls.append(name)
            return result(*rest)

        return hook

    def set_attribute(owner, *rest):
        calls.append("sets an attribute")
        owner.extra = torch.ones(())

    module.register_forward_hook(note("the layer's own"))
    module.one.register_forward_pre_hook(note("looks before"))
    module.one.register_forward_pre_hook(note("changes the input", lambda args: (args[0] + 1,)))
    module.one.register_forward_pre_hook(set_attribute)
    module.one.register_forward_hook(note("looks"))
    module.one.register_forward_hook(note("changes the output", lambda args, output: output + 1))
    module.other.register_forward_hook(note("changes in place", lambda args, output: _doubled(output)))
    module.other.register_forward_hook(note("with keywords"), with_kwargs=True)
    module.other.register_forward_hook(note("looks always"), always_call=True)
    x, hooks = torch.ones(1, 2), ForwardHooks(ModulePlaces(module).modules)
    kept = [dict(m._forward_hooks) for m in (module.one, module.other)]
    with hooks.first():
        first = module.forward(x)
    assert (len(calls), len(looked)) == (4, 4)
    calls.clear()
    with hooks.again():
        again = module.forward(x)
    assert_close(again, first)
    assert calls == ["changes the input", "sets an attribute", "changes the output", "changes in place"]
    assert len(looked) == 4
    assert [dict(m._forward_hooks) for m in (module.one, module.other)] == kept


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_a_hook_on_all_modules_is_one_of_them(kind, looks):
    module, calls = Two(), []

    def hook(module, args, output=None):
        calls.append(module)
        return None if looks else args[0] + 1 if output is None else output + 1

    register = getattr(torch.nn.modules.module, f"register_module_{kind}_hook")
    handle = register(hook)
    try:
        x, hooks = torch.ones(1, 2), ForwardHooks(ModulePlaces(module).modules)
        with hooks.first():
            first = module.forward(x)
        assert calls == [module.one, module.other]
        calls.clear()
        with hooks.again():
            again = module.forward(x)
        assert_close(again, first)
        assert calls == ([] if looks else [module.one, module.other])
        calls.clear()
        assert_close(module.forward(x), first)
        assert calls == [module.one, module.other]
    finally:
        handle.remove()


class Plain(nn.Module):
    """What a layer may be made of that a user changes between two passes."""

    def __init__(self):
        super().__init__()
        self.factor, self.kinds, self.inner = 2.0, ["a"], nn.Dropout(0.0)
        self.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool))
        self.register_buffer("row", torch.ones(2))
        self.register_buffer("table", torch.ones(2, 2))
        self.plan = nn.Identity  # of a kind that can be referred to weakly
        self.tables = [object(), object()]  # of a kind that may refer to anything
        self.scales, self.tensors = {str(number): 1.0 for number in range(20)}, [torch.ones(2)]


def ran(module):
    state = State(ModulePlaces(module))
    state.ran()
    return state


def test_of_large_tensors_only_buffers_that_training_writes_are_held_for_the_second_run():
    module = Codebook()
    module.register_buffer("cache", torch.ones(64, 8), persistent=False)
    module.mask = torch.ones(64, 8)
    state = State(ModulePlaces(module))
    module(torch.randn(4, 8))
    state.ran()
    assert {name for _, name, _ in state._changed} == {"book", "average"}


def test_what_the_user_changes_after_the_first_run_is_put_back_for_the_second():
    module = Plain()
    state, mask, kinds = ran(module), module.mask, module.kinds
    module.eval()
    module.factor, module.kinds, module.plan = 3.0, ["b"], nn.Linear
    module.mask = torch.zeros(2, 2, dtype=torch.bool)
    module.row.zero_()
    module.table.data.zero_()
    module.scales["0"], module.tensors[0] = 0.5, torch.zeros(2)
    now = module.mask
    with state.again():
        assert_close(module.row, torch.ones(2))
        assert_close(module.table, torch.ones(2, 2))
        assert (module.scales["0"], module.scales["1"]) == (1.0, 1.0)
        assert_close(module.tensors, [torch.ones(2)])
        assert module.training
        assert module.inner.training
        assert (module.factor, module.plan) == (2.0, nn.Identity)
        assert_close([module.mask, module.kinds], [mask, kinds])
    assert not module.training
    assert not module.inner.training
    assert (module.factor, module.kinds, module.plan) == (3.0, ["b"], nn.Linear)
    assert module.mask is now
    assert_close([module.row, module.table, *module.tensors], [torch.zeros(2), torch.zeros(2, 2), torch.zeros(2)])
    assert module.scales["0"] == 0.5


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda module: module.mask.zero_(), r"buffer mask of a Plain has been written"),
        (lambda module: setattr(module, "tables", {}), r"attribute tables of a Plain has been replaced"),
        (lambda module: delattr(module, "tables"), r"attribute tables of a Plain has been replaced"),
        (lambda module: module.tables.pop(), r"attribute tables of a Plain has been written"),
        (lambda module: module.tables.__setitem__(0, object()), r"attribute tables of a Plain has been written"),
        (lambda module: module.tensors[0].zero_(), r"attribute tensors of a Plain has been written"),
    ],
    ids=["written", "replaced", "deleted", "shortened", "item", "tensor in a list"],
)
def test_what_cannot_be_put_back_is_refused(change, what):
    module = Plain()
    state = ran(module)
    change(module)
    with pytest.raises(OffloadedModelError, match=what), state.again():
        pass


def test_modules_are_gone_through_once_a_run_however_many_hooks_are_called(monkeypatch):
    """A layer of many modules with a hook each took the square of their number."""
    walks, keys = [], ForwardHooks._keys
    monkeypatch.setattr(ForwardHooks, "_keys", lambda hooks: walks.append(1) or keys(hooks))
    module, x = Two(), torch.ones(1, 2)
    for one in (module.one, module.other):
        one.register_forward_pre_hook(lambda m, args: None)
        one.register_forward_hook(lambda m, args, output: output + 1)
    hooks = ForwardHooks(ModulePlaces(module).modules)
    with hooks.first():
        first = module.forward(x)
    assert len(walks) == 1
    with hooks.again():
        assert_close(module.forward(x), first)
    assert len(walks) == 2


def test_hooks_that_come_or_go_after_the_first_run():
    module, x = Two(), torch.ones(1, 2)
    module.one.register_forward_hook(lambda m, a, output: output + 1)
    looks = module.one.register_forward_hook(lambda m, a, output: None)
    changes = module.other.register_forward_pre_hook(lambda m, a: (a[0] * 2,))
    hooks = ForwardHooks(ModulePlaces(module).modules)
    with hooks.first():
        first = module.forward(x)
    late = module.other.register_forward_hook(lambda m, a, output: output * 100)
    looks.remove()
    with hooks.again():
        assert_close(module.forward(x), first)
    assert late.id in module.other._forward_hooks
    changes.remove()
    with pytest.raises(OffloadedModelError, match=r"one of a Linear has been removed in between"), hooks.again():
        pass


@pytest.mark.parametrize("often", ["each time", "once"])
@pytest.mark.parametrize("by", ["the layer", "a hook that looks", "a hook that changes"])
@pytest.mark.parametrize("on", ["one", "other", None])
def test_hooks_that_come_during_the_first_run_stay_and_run_from_then_on(on, by, often):
    """On a module that has run already, or is still to run, with hooks of its own or without; in one run only."""
    calls: list[str] = []

    class Registering(Two):
        def forward(self, x):
            x = self.one(x)
            if by == "the layer":
                self.register()
            return self.other(x)

        def register(self):
            if often == "once" and hasattr(self, "late"):
                return

            def late(module, args, output):
                calls.append("late")
                return output * 10

            self.late = (self if on is None else getattr(self, on)).register_forward_hook(late)

    def run(twice):
        torch.manual_seed(0)
        module, x = Registering(), torch.ones(1, 2)
        module.one.register_forward_hook(lambda m, a, output: calls.append("one"))
        if by != "the layer":
            came: list[int] = []  # which nothing puts back for a second run

            def register(owner, args, output):
                if often == "each time" or not came:
                    came.append(1)
                    module.register()
                return None if by == "a hook that looks" else output + 1

            module.one.register_forward_hook(register)
        calls.clear()
        hooks, state = ForwardHooks(ModulePlaces(module).modules), State(ModulePlaces(module))
        with hooks.first() if twice else nullcontext():
            outputs = [module.forward(x)]
        state.ran()
        if twice:
            seen = [*calls]
            with state.again(), hooks.again():
                assert_close(module.forward(x), outputs[0])
            calls[:] = seen
        kept = [len(m._forward_hooks) for m in (module, module.one, module.other)]
        outputs.append(module(x))
        module.late.remove()
        kept += [len(m._forward_hooks) for m in (module, module.one, module.other)]
        return outputs, kept, [*calls]

    (plain, *expected), (ours, *got) = run(False), run(True)
    assert_close(ours, plain)
    assert got == expected


def test_a_hook_that_is_removed_during_the_first_run_is_gone_at_once():
    calls: list[int] = []

    class Once(Two):
        def forward(self, x):
            x = self.one(x)
            self.looking.remove()
            return self.one(x)

    module, x = Once(), torch.ones(1, 2)
    module.looking = module.one.register_forward_hook(lambda *_: calls.append(1))
    hooks = ForwardHooks(ModulePlaces(module).modules)
    with hooks.first():
        first = module.forward(x)
    assert calls == [1]
    with hooks.again():
        assert_close(module.forward(x), first)
    assert calls == [1]
    assert not module.one._forward_hooks


class Codebook(nn.Module):
    """Moves by .data, as the exponential averages of vector-quantize-pytorch do."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.register_buffer("book", torch.randn(16, 8))
        self.register_buffer("average", torch.ones(4, 8))

    def forward(self, x):
        hidden = self.project(x)
        near = self.book[torch.cdist(hidden.detach(), self.book).argmin(-1)]
        self.book.data.mul_(0.5).add_(hidden.detach().mean(0))
        out = x + hidden * self.average.mean() + (hidden - near).square().mean()
        self.average.data.add_(hidden.detach().mean())
        return out


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scaling = {str(number): 1.0 for number in range(9)}
        self.scales = [torch.tensor(1.0)]

    def forward(self, x):
        return x + torch.tanh(self.linear(x) * self.scaling["0"] * self.scales[0])


def halved(model):
    for layer in model[1:]:
        layer.scaling["0"] *= 0.5
        layer.scales[0] = layer.scales[0] * 0.5


@pytest.mark.parametrize(("kind", "between"), [(Codebook, lambda model: None), (Scaled, halved)])
def test_training_is_plain_where_layers_write_by_data_or_flat_containers_change_between_the_passes(kind, between):
    def train(offloaded):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), *(kind() for _ in range(4)))
        x = torch.randn(5, 8)
        if offloaded:
            stronghold.offload(model, window=2, device="cpu")
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(3):
            loss = model(x).square().mean()
            between(model)
            loss.backward()
            losses += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        return losses, [buffer.clone() for buffer in model.buffers()]

    assert_close(train(True), train(False))
