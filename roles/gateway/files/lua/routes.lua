-- SPDX-License-Identifier: GPL-3.0-or-later
-- Which workers serve which model, and which of HAProxy's backends stand for them. Knows nothing of HAProxy.
--
-- A *pool* is a backend with all workers, of which those with a weight belong to it; its queue, its least-connections choice
-- and its retries stay HAProxy's, within the members. Models that the same workers have share a pool.
--
-- A worker here is a table: name, key (which of the workers' keys it asks for), weight, max_requests, on_demand;
--   state   "down", "unread" (it has come back and has not told its models yet), "read", "failed" (it cannot tell them), or
--           "unreachable" (though its health is good)
--   warm    name to true: the models that it has loaded, as it told last, or as the inventory announces them
-- A pool of workers that have told their models serves with those; one in which only such are left that cannot tell them at the
-- moment, but had them when they told last, with these.
--   cold    name to true: those that it would load

local routes = {}

function routes.sorted_keys(set)
  local keys = {}
  for key in pairs(set) do
    keys[#keys + 1] = key
  end
  table.sort(keys)
  return keys
end

local sorted_keys = routes.sorted_keys

-- The sets of workers, one for each key among them, as a list of {kind, key, members = {index, ...}, signature}: "read" ones
-- are of workers that have told their models, "failed" ones of those that cannot.
local function sets_of(kind, indexes, workers)
  local by_key, sets = {}, {}
  for _, index in ipairs(indexes) do
    local key = workers[index].key
    by_key[key] = by_key[key] or { kind = kind, key = key, members = {} }
    table.insert(by_key[key].members, index)
  end
  for _, key in ipairs(sorted_keys(by_key)) do
    local set = by_key[key]
    set.signature = kind .. ":" .. table.concat(set.members, ",")
    sets[#sets + 1] = set
  end
  return sets
end

-- Name to list of indexes of workers, for one of the tables `warm` and `cold`.
local function having(workers, class, wanted)
  local found = {}
  for index, worker in ipairs(workers) do
    if not wanted or wanted(worker) then
      for name in pairs(worker[class]) do
        found[name] = found[name] or {}
        table.insert(found[name], index)
      end
    end
  end
  return found
end

local function is_subset(items, others)
  local there = {}
  for _, item in ipairs(others) do
    there[item] = true
  end
  for _, item in ipairs(items) do
    if not there[item] then
      return false
    end
  end
  return true
end

-- The workers with this key that have all these models.
local function with_all(names, key, workers)
  local found = {}
  for index, worker in ipairs(workers) do
    local has_all = worker.key == key
    for _, name in ipairs(names) do
      has_all = has_all and (worker.warm[name] or worker.on_demand and worker.cold[name])
    end
    if has_all then
      found[#found + 1] = index
    end
  end
  return found
end

local function is_told(pool, workers)
  for _, index in ipairs(pool.members) do
    if workers[index].state == "read" then
      return true
    end
  end
  return false
end

-- The plan for these workers: at most `count` pools, of which a set keeps the one that it had in `former`, so that what
-- waits there stays with its model. `waits` tells of a number whether requests wait there ("queue") or are in flight ("busy"):
-- such a pool is given to no others, and where its set is no more, it goes on with those that have all its models. Returns
--   pools   number to {kind, members, key, names, told: has a member told its models?, is_rest: it only has requests to end}
--   models  name to {warm = {number, ...}, cold = {number, ...}}
--   failed  numbers of pools of workers that have never told their models; left_out  sets that no pool was left for
function routes.plan(workers, count, former, waits)
  local warm = having(workers, "warm")
  local cold = having(workers, "cold", function(worker)
    return worker.on_demand
  end)
  local needed, users = {}, {}
  local function need(set, name)
    needed[set.signature] = needed[set.signature] or set
    users[set.signature] = users[set.signature] or {}
    if name then
      table.insert(users[set.signature], name)
    end
  end

  local models, known = {}, {}
  for class, found in pairs({ warm = warm, cold = cold }) do
    for name, indexes in pairs(found) do
      -- Hundreds of models have the same few sets.
      local key = table.concat(indexes, ",")
      known[key] = known[key] or sets_of("read", indexes, workers)
      models[name] = models[name] or { warm = {}, cold = {} }
      models[name][class] = known[key]
      for _, set in ipairs(models[name][class]) do
        need(set, name)
      end
    end
  end

  local unknown = {}
  for index, worker in ipairs(workers) do
    if worker.state == "failed" and next(worker.warm) == nil then
      unknown[#unknown + 1] = index
    end
  end
  local failed = sets_of("failed", unknown, workers)
  for _, set in ipairs(failed) do
    need(set)
  end

  -- Small sets first, since one can stand in for a larger one but not the other way round.
  local signatures = sorted_keys(needed)
  table.sort(signatures, function(one, other)
    local size, others = #needed[one].members, #needed[other].members
    if size ~= others then
      return size < others
    end
    return one < other
  end)
  for _, signature in ipairs(signatures) do
    needed[signature].names = users[signature]
  end

  -- Numbers: first who had one, then who comes after a set with one of the same models, then the rest.
  local pools, number_of, free, busy = {}, {}, {}, {}
  for number = 1, count do
    local set = former and former.pools[number]
    local in_use = set and waits(number)
    if in_use and not (needed[set.signature] and is_subset(set.names, users[set.signature])) then
      pools[number] = {
        kind = set.kind,
        members = with_all(set.names, set.key, workers),
        names = set.names,
        key = set.key,
        signature = "rest " .. number,
        is_rest = true,
      }
      -- Where nothing waits any more it may be needed more urgently.
      if in_use == "busy" then
        table.insert(busy, number)
      end
    elseif set and needed[set.signature] then
      pools[number], number_of[set.signature] = needed[set.signature], number
    else
      free[number] = true
    end
  end
  local function take(signature, number)
    pools[number], number_of[signature], free[number] = needed[signature], number, nil
  end
  for _, signature in ipairs(signatures) do
    for _, name in ipairs(number_of[signature] and {} or users[signature]) do
      local before = former and former.models[name]
      for _, number in ipairs(before and before.warm or {}) do
        if free[number] and not number_of[signature] then
          take(signature, number)
        end
      end
    end
  end
  -- A set without a pool is served by pools of some of its workers.
  local function numbers(set)
    if number_of[set.signature] then
      return { number_of[set.signature] }
    end
    local found = {}
    for number, pool in pairs(pools) do
      if pool.kind == set.kind and not pool.is_rest and is_subset(pool.members, set.members) then
        found[#found + 1] = number
      end
    end
    return found
  end
  -- The number of the largest set that others can stand in for, and where nothing waits.
  local function largest()
    local found
    for number, pool in pairs(pools) do
      local size = #pool.members
      if not pool.is_rest and size > 1 and waits(number) ~= "queue" then
        found = (not found or size > #pools[found].members) and number or found
      end
    end
    return found
  end
  for _, signature in ipairs(signatures) do
    local number = not number_of[signature] and (sorted_keys(free)[1] or table.remove(busy))
    if not number and not number_of[signature] and #numbers(needed[signature]) == 0 then
      number = largest()
      if number then
        number_of[pools[number].signature] = nil
      end
    end
    if number then
      take(signature, number)
    end
  end
  local left_out = 0
  for _, signature in ipairs(signatures) do
    left_out = left_out + (number_of[signature] and 0 or 1)
  end

  local function all_numbers(sets)
    local found = {}
    for _, set in ipairs(sets) do
      for _, number in ipairs(numbers(set)) do
        found[#found + 1] = number
      end
    end
    table.sort(found)
    return found
  end
  for _, route in pairs(models) do
    route.warm, route.cold = all_numbers(route.warm), all_numbers(route.cold)
  end
  for _, pool in pairs(pools) do
    pool.told = is_told(pool, workers)
  end
  return { pools = pools, models = models, failed = all_numbers(failed), left_out = left_out }
end

-- How a worker's cap is divided among the pools that it belongs to: as even as their demands allow, in whole requests, never
-- more in all than the cap. `demands` is a list of requests in flight and waiting; returns a list of shares.
-- An idle pool keeps one place, so that its first request need not wait for the next division, unless there are too few. Then
-- those that ask for one come first, and of them who has been without for longest (`rested`, of each the time).
function routes.shares(cap, demands, rested)
  local order, shares, left = {}, {}, cap
  for index in ipairs(demands) do
    order[index], shares[index] = index, 0
  end
  table.sort(order, function(one, other)
    if (demands[one] > 0) ~= (demands[other] > 0) then
      return demands[one] > 0
    elseif rested[one] ~= rested[other] then
      return rested[one] > rested[other]
    end
    return one < other
  end)
  for _, index in ipairs(order) do
    if left > 0 then
      shares[index], left = 1, left - 1
    end
  end
  -- One by one to whoever has least of what it asks for.
  while left > 0 do
    local poorest
    for _, index in ipairs(order) do
      if shares[index] < demands[index] and (not poorest or shares[index] < shares[poorest]) then
        poorest = index
      end
    end
    if not poorest then
      break
    end
    shares[poorest], left = shares[poorest] + 1, left - 1
  end
  -- What nobody asks for goes round, so that a burst finds room anywhere.
  local turn = 0
  while left > 0 and #order > 0 do
    local index = order[turn % #order + 1]
    shares[index], left, turn = shares[index] + 1, left - 1, turn + 1
  end
  return shares
end

-- The next step from `current` shares to `wanted`: who has more gives it up at once, and who gets more waits until it is
-- really free. That shows at the next step at the earliest, as HAProxy gives a request its place some time before it counts it
-- among those in flight.
function routes.next_shares(cap, current, wanted, in_flight)
  local shares, free = {}, cap
  for index in ipairs(wanted) do
    free = free - math.max(current[index], in_flight[index])
  end
  for index in ipairs(wanted) do
    -- What it has in flight is bound already, and may be kept up.
    local bound = math.max(current[index], in_flight[index])
    local more = math.max(math.min(wanted[index] - bound, free), 0)
    shares[index], free = math.min(bound, wanted[index]) + more, free - more
  end
  return shares
end

local turn = 0

-- The best of these pools, and how many places are free and how many requests wait in all that live: the one that has least
-- to do for its size; those that are alike take turns. `look` tells of a number: live workers, requests there, free places,
-- requests waiting.
function routes.best(numbers, look)
  turn = turn + 1
  local best, best_load
  local free_in_all, waiting_in_all = 0, 0
  for place = 1, #numbers do
    local number = numbers[(place + turn) % #numbers + 1]
    local live, requests, free, waiting = look(number)
    if live > 0 then
      free_in_all, waiting_in_all = free_in_all + free, waiting_in_all + waiting
      local load = requests / math.max(requests - waiting + free, 1)
      if not best or load < best_load then
        best, best_load = number, load
      end
    end
  end
  return best, free_in_all, waiting_in_all
end

-- Where a request for `name` goes: the number of a pool and its class ("warm", "possibly" or "cold"), or nil.
-- `spill_after`, unless 0: with so many waiting for warm workers, one that would have to load the model may.
function routes.choose(plan, name, spill_after, look)
  local route = plan.models[name] or { warm = {}, cold = {} }
  local told, possibly = {}, {}
  for _, pool in ipairs(route.warm) do
    table.insert(plan.pools[pool].told and told or possibly, pool)
  end
  local number, free, waiting = routes.best(told, look)
  if number then
    if spill_after > 0 and free <= 0 and waiting >= spill_after then
      local cold = routes.best(route.cold, look)
      if cold then
        return cold, "spill"
      end
    end
    return number, "warm"
  end
  for _, pool in ipairs(plan.failed) do
    possibly[#possibly + 1] = pool
  end
  number = routes.best(possibly, look)
  if number then
    return number, "possibly"
  end
  number = routes.best(route.cold, look)
  if number then
    return number, "cold"
  end
  return nil
end

return routes
