# SPDX-License-Identifier: GPL-3.0-or-later
"""The pure parts of the gateway's program, as tables: what a request asks for, and who has what."""

from __future__ import annotations

import json
import random
from typing import Any

import lupa.lua53
import lupa.lua54
import pytest

from tests.gateway.conftest import ROOT


@pytest.fixture(scope="module", params=[lupa.lua53, lupa.lua54], ids=["Lua 5.3", "Lua 5.4"])
def lua(request: pytest.FixtureRequest) -> Any:
    """The languages of the HAProxy of Debian 12 and 13, with Python's reader of JSON in the library's place."""
    runtime = request.param.LuaRuntime(unpack_returned_tuples=True, encoding="utf-8")

    def decode(text: str) -> Any:
        value = json.loads(text)
        return runtime.table_from(value, recursive=True) if isinstance(value, (dict, list)) else value

    runtime.execute(f"package.path = '{ROOT}/roles/gateway/files/lua/?.lua'")
    cjson = runtime.table_from({"decode": decode, "encode": json.dumps, "null": "null"})
    runtime.globals().package.loaded["cjson"] = cjson
    return runtime


def part(lua: Any, name: str) -> Any:
    """One of the program's files. Lua 5.4 also tells where it found it."""
    found = lua.require(name)
    return found[0] if isinstance(found, tuple) else found


def plain(value: Any) -> Any:
    """A table as a list or a mapping."""
    if not hasattr(value, "items"):
        return value
    items = {key: plain(item) for key, item in value.items()}
    return list(items.values()) if items and list(items) == list(range(1, len(items) + 1)) else items


FAR = "x" * 70_000
MANY = [{"model": "no"}] * 10


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"model":"a"}', "a"),
        (' \n{ "model" : "a" }\n', "a"),
        ('{"messages":[{"model":"no"}],"model":"a"}', "a"),
        ('{"model":"a","messages":[{"model":"no"}]}', "a"),
        ('{"x":"\\"model\\":\\"no\\"","model":"a"}', "a"),
        ('{"x":"{[\\\\","model":"a"}', "a"),
        ('{"x":"model","model":"a","y":"}"}', "a"),
        ('{"kind":"model","model":"a"}', "a"),
        (json.dumps({"messages": [FAR], "model": "a"}), "a"),
        (json.dumps({"messages": [FAR, {"model": "no"}], "model": "a", "tools": [{"x": [1]}]}), "a"),
        (json.dumps({"messages": [FAR], "model": "a", "more": [FAR]}), "a"),
        (json.dumps({"messages": [FAR, *MANY], "model": "a"}), "a"),
        (json.dumps({"messages": [FAR, *MANY], "model": "a", "more": [FAR]}), "a"),
        ('{"model":"organisation\\/name"}', "organisation/name"),
        ('{"mod\\u0065l":"\\u00e8"}', "\u00e8"),
        ('{"model":"\u00e8 \u6587"}', "\u00e8 \u6587"),
        ('{"model":""}', "no_model"),
        ('{"model":null}', "no_model"),
        ('{"model":7}', "no_model"),
        ('{"model":["a"]}', "no_model"),
        ("{}", "no_model"),
        ('{"x":{"model":"no"}}', "no_model"),
        ('{"x":[{"model":"no"}],"y":1}', "no_model"),
        (json.dumps({"messages": [FAR, *MANY]}), "no_model"),
        ("", "broken"),
        ("[]", "broken"),
        ('"model"', "broken"),
        ("{", "broken"),
        ('{"x":[{"model":"no"}]', "broken"),
        ("{'model':'a'}", "broken"),
    ],
)
def test_the_model_of_a_body(lua: Any, body: str, expected: str) -> None:
    found = part(lua, "asked").in_json(body)
    name, problem = found if isinstance(found, tuple) else (found, None)
    assert (problem or name) == expected


def test_the_model_of_any_body(lua: Any) -> None:
    """What the search finds is what a reader of JSON finds."""
    asked = part(lua, "asked")
    chosen = random.Random(7)

    def value(depth: int) -> Any:
        kind = chosen.randrange(6 if depth else 3)
        if kind == 0:
            return chosen.choice(
                ["model", '"model":"no"', "\\", '\\"', "}{][", "", "x" * chosen.randrange(99)]
            )
        if kind == 1:
            return chosen.choice([0, -1.5, True, None, 1e20])
        if kind == 2:
            return "y" * chosen.choice([1, 66_000])
        if kind == 3:
            return [value(depth - 1) for _ in range(chosen.randrange(4))]
        return {
            chosen.choice(["model", "models", "x", '"model"', ""]): value(depth - 1)
            for _ in range(chosen.randrange(4))
        }

    for _ in range(400):
        body = {chosen.choice(["a", "b", '"', "model"]): value(3) for _ in range(4)}
        text = json.dumps(body, ensure_ascii=chosen.choice([True, False]))
        found = asked.in_json(text)
        expected = body.get("model")
        if isinstance(expected, str) and expected:
            assert found == expected, text[:300]
        else:
            assert found == (None, "no_model"), text[:300]


WORKER = {"key": "", "weight": 1, "max_requests": 4, "on_demand": False, "state": "read", "cold": []}


def worker(warm: str = "", cold: str = "", **values: Any) -> dict[str, Any]:
    """A worker with these models, named by letters."""
    sets = {"warm": dict.fromkeys(warm, True), "cold": dict.fromkeys(cold, True)}
    return {**WORKER, "on_demand": bool(cold), **sets, **values}


def planned(
    lua: Any,
    workers: list[dict[str, Any]],
    count: int = 8,
    former: Any = None,
    busy: dict[int, str] | None = None,
) -> Any:
    """`busy`: what there is to do in a pool of the former plan."""
    return part(lua, "routes").plan(
        lua.table_from(workers, recursive=True), count, former, lambda number: (busy or {}).get(number)
    )


def members(plan: Any, numbers: Any) -> list[Any]:
    return [list(plan.pools[number].members.values()) for number in numbers.values()]


@pytest.mark.parametrize(
    ("workers", "warm", "cold"),
    [
        ([], {}, {}),
        ([worker("a"), worker("a")], {"a": [[1, 2]]}, {}),
        ([worker("ab"), worker("a")], {"a": [[1, 2]], "b": [[1]]}, {}),
        ([worker("a"), worker("b")], {"a": [[1]], "b": [[2]]}, {}),
        ([worker("a"), worker("b", "a")], {"a": [[1]], "b": [[2]]}, {"a": [[2]]}),
        ([worker("a"), worker("", "a", on_demand=False)], {"a": [[1]]}, {}),
        # One request can carry one key only.
        ([worker("a"), worker("a", key="k"), worker("a")], {"a": [[1, 3], [2]]}, {}),
        # A worker that is away keeps its place.
        ([worker("a"), worker("a", state="down")], {"a": [[1, 2]]}, {}),
    ],
)
def test_who_has_a_model(lua: Any, workers: list[Any], warm: dict[str, Any], cold: dict[str, Any]) -> None:
    plan = planned(lua, workers)
    for name, expected in warm.items():
        assert sorted(members(plan, plan.models[name].warm)) == sorted(expected)
    for name, expected in cold.items():
        assert sorted(members(plan, plan.models[name].cold)) == sorted(expected)
    assert set(plan.models.keys()) == set(warm) | set(cold)
    assert plan.left_out == 0


def test_models_of_the_same_workers_share_a_pool(lua: Any) -> None:
    plan = planned(lua, [worker("abc"), worker("abc"), worker("c", "d")])
    assert list(plan.models.a.warm.values()) == list(plan.models.b.warm.values())
    assert len(list(plan.pools.keys())) == 3


def test_who_never_told_may_have_anything(lua: Any) -> None:
    plan = planned(lua, [worker("a"), worker("b", state="failed"), worker(state="failed")])
    assert members(plan, plan.failed) == [[3]]
    assert {name: plan.pools[next(iter(plan.models[name].warm.values()))].told for name in "ab"} == {
        "a": True,
        "b": False,
    }


def test_a_set_that_nobody_stands_in_for_takes_the_place_of_one_that_others_do(lua: Any) -> None:
    first = planned(lua, [worker("a"), worker("ab"), worker()], count=3)
    second = planned(lua, [worker("ac"), worker("ab"), worker("d")], count=3, former=first)
    for name, expected in {"a": [[1], [2]], "b": [[2]], "c": [[1]], "d": [[3]]}.items():
        assert sorted(members(second, second.models[name].warm)) == expected
    assert second.left_out == 1


def test_what_waits_goes_on_with_who_has_its_model(lua: Any) -> None:
    """Its pool is given to nobody else meanwhile, however much changes."""
    first = planned(lua, [worker("m"), worker("mk")])
    (both,) = first.models.m.warm.values()
    second = planned(lua, [worker("z"), worker("mk")], former=first, busy={both: "queue"})
    assert list(second.pools[both].members.values()) == [2]
    assert second.pools[both].is_rest
    for name, expected in {"z": [[1]], "m": [[2]], "k": [[2]]}.items():
        assert members(second, second.models[name].warm) == expected
        assert both not in second.models[name].warm.values()
    # A set that is still there, but no longer has all that waits there, begins anew elsewhere.
    third = planned(lua, [worker("k"), worker("k", key="x")], former=second, busy={both: "queue"})
    assert list(third.pools[both].members.values()) == []
    # When nothing waits any more, the number is free again.
    fourth = planned(lua, [worker("z"), worker("mk")], former=second)
    assert not any(pool.is_rest for pool in fourth.pools.values())


def test_what_is_in_flight_gives_its_pool_to_who_has_none(lua: Any) -> None:
    first = planned(lua, [worker("a")], count=1)
    second = planned(lua, [worker("b")], count=1, former=first, busy={1: "busy"})
    assert members(second, second.models.b.warm) == [[1]]
    assert second.left_out == 0


def test_a_pool_stays_with_its_models(lua: Any) -> None:
    """Whatever else comes and goes; so what waits in it finds the right workers."""
    first = planned(lua, [worker("b"), worker("b")])
    (number,) = first.models.b.warm.values()
    second = planned(lua, [worker("ab"), worker("b"), worker("c")], former=first)
    assert list(second.models.b.warm.values()) == [number]
    third = planned(lua, [worker("a"), worker("b"), worker("c")], former=second)
    assert members(third, third.models.b.warm) == [[2]]
    assert list(third.models.b.warm.values()) == [number]


def test_where_pools_do_not_suffice_some_workers_stand_for_all(lua: Any) -> None:
    plan = planned(lua, [worker("ab"), worker("b"), worker("c")], count=2)
    assert plan.left_out == 1
    used = list(plan.pools.keys())
    assert len(used) == 2
    assert all(set(one) <= {1, 2} for one in members(plan, plan.models.b.warm))


@pytest.mark.parametrize(
    ("cap", "demands", "expected"),
    [
        (12, [], []),
        (12, [0], [12]),
        (12, [0, 0], [6, 6]),
        (12, [100, 0], [11, 1]),
        (12, [100, 100], [6, 6]),
        (12, [100, 3], [9, 3]),
        (12, [2, 100, 3], [2, 7, 3]),
        (12, [1, 1, 0], [4, 4, 4]),
        (2, [5, 5, 5], [1, 1, 0]),
        (1, [0, 3], [0, 1]),
        (1, [0, 0], [1, 0]),
    ],
)
def test_a_cap_is_shared_fairly(lua: Any, cap: int, demands: list[int], expected: list[int]) -> None:
    shares = part(lua, "routes").shares(cap, lua.table_from(demands), lua.table_from([0] * len(demands)))
    assert list(shares.values()) == expected


@pytest.mark.parametrize(
    ("demands", "rested", "expected"),
    [
        ([2, 1], [0, 5], [0, 1]),
        ([2, 1], [5, 0], [1, 0]),
        ([0, 1], [9, 0], [0, 1]),
        ([0, 0], [1, 2], [0, 1]),
    ],
)
def test_a_single_place_goes_round(
    lua: Any, demands: list[int], rested: list[int], expected: list[int]
) -> None:
    shares = part(lua, "routes").shares(1, lua.table_from(demands), lua.table_from(rested))
    assert list(shares.values()) == expected


def test_no_step_between_shares_exceeds_the_cap(lua: Any) -> None:
    """However requests come and go meanwhile, and though HAProxy counts one only some time after it has its place."""
    routes = part(lua, "routes")
    chosen = random.Random(1)
    for _ in range(50):
        cap, pools = chosen.randint(1, 12), chosen.randint(2, 5)
        current, in_flight = [0] * pools, [0] * pools

        def step(*parts: list[int]) -> list[int]:
            return list(routes.next_shares(cap, *map(lua.table_from, parts)).values())  # noqa: B023  (called at once)

        for _ in range(60):
            counted = list(in_flight)
            demands = [there + chosen.choice([0, 0, 3, 20]) for there in counted]
            rested = [chosen.randrange(9) for _ in demands]
            wanted = list(routes.shares(cap, lua.table_from(demands), lua.table_from(rested)).values())
            assert sum(wanted) == cap
            # Before the step is taken some more get a place under the former shares, and after it under the new ones.
            former, current = current, step(current, wanted, counted)
            for shares in (former, current):
                in_flight = [
                    chosen.randint(there, max(share, there))
                    for there, share in zip(in_flight, shares, strict=True)
                ]
            assert sum(in_flight) <= cap
            in_flight = [chosen.randint(0, there) for there in in_flight]
        # With nobody left the wanted shares are reached: what is given up by one, and then taken by another.
        current = step(current, wanted, [0] * pools)
        assert step(current, wanted, [0] * pools) == wanted


# Number of a pool to: live workers, requests there, free places, waiting. The fifth has only workers that cannot tell.
LOOKS = {1: (2, 4, 8, 0), 2: (1, 0, 4, 0), 3: (0, 0, 0, 0), 4: (1, 9, 0, 5), 5: (1, 0, 4, 0)}


@pytest.mark.parametrize(
    ("route", "failed", "spill", "expected"),
    [
        ({"warm": [1], "cold": [2]}, [], 0, (1, "warm")),
        ({"warm": [1, 2], "cold": []}, [], 0, (2, "warm")),
        ({"warm": [3], "cold": [2]}, [], 0, (2, "cold")),
        ({"warm": [1, 5], "cold": [2]}, [], 0, (1, "warm")),
        ({"warm": [3, 5], "cold": [2]}, [], 0, (5, "possibly")),
        ({"warm": [3], "cold": [2]}, [1], 0, (1, "possibly")),
        (None, [1], 0, (1, "possibly")),
        (None, [], 0, None),
        ({"warm": [3], "cold": []}, [], 0, None),
        ({"warm": [4], "cold": [2]}, [], 0, (4, "warm")),
        ({"warm": [4], "cold": [2]}, [], 5, (2, "spill")),
        ({"warm": [4], "cold": [2]}, [], 6, (4, "warm")),
        ({"warm": [4], "cold": [3]}, [], 5, (4, "warm")),
        ({"warm": [1], "cold": [2]}, [], 1, (1, "warm")),
    ],
)
def test_where_a_request_goes(lua: Any, route: Any, failed: list[int], spill: int, expected: Any) -> None:
    pools = [{"told": number != 5} for number in LOOKS]
    plan = {"models": {"m": route} if route else {}, "failed": failed, "pools": pools}
    found = part(lua, "routes").choose(
        lua.table_from(plan, recursive=True), "m", spill, lambda number: LOOKS[number]
    )
    assert found == expected


@pytest.mark.parametrize(
    ("place", "text", "loaded", "others"),
    [
        ("/v1/models", '{"data":[{"id":"a"},{"id":"b"}]}', {"a", "b"}, set()),
        ("/v1/models", '{"data":[]}', set(), set()),
        (
            "/v1/models",
            '{"data":[{"id":"a","status":{"value":"loaded"}},{"id":"b","status":{"value":"unloaded"}}]}',
            {"a"},
            {"b"},
        ),
        ("/v1/models", '{"data":[{"id":""},{"id":7},{"name":"x"}]}', set(), set()),
        ("/api/ps", '{"models":[{"name":"a:latest"}]}', {"a:latest"}, set()),
        ("/api/tags", '{"models":[{"name":"a"}]}', {"a"}, set()),
        (
            "/running",
            '{"running":[{"model":"a","state":"ready"},{"model":"b","state":"starting"}]}',
            {"a"},
            {"b"},
        ),
    ],
)
def test_what_a_worker_tells(lua: Any, place: str, text: str, loaded: set[str], others: set[str]) -> None:
    found = part(lua, "catalogue").models_in(place, text)
    assert (set(found[0].keys()), set(found[1].keys())) == (loaded, others)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"error":"x"}', "<html>", '{"data":null}'])
def test_what_is_no_list_is_no_empty_list(lua: Any, text: str) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011  (of Lua or of the reader of JSON)
        part(lua, "catalogue").models_in("/v1/models", text)
