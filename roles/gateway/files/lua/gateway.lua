-- SPDX-License-Identifier: GPL-3.0-or-later
-- What HAProxy cannot do by itself: know which worker has which model, send each request to those that have it, answer the
-- list of models, and hold a request while nobody serves its model.
--
-- HAProxy does all else. It checks each worker in the backend `workers`; the backends pool1, pool2, ... each have all workers,
-- and this program gives a weight to those of them that belong to a pool (routes.lua). Where it fails, the last weights stay.
--
--   http-req lua.route    for what HAProxy finds in no table: reads the model, waits for a worker, sets txn.model, txn.pool,
--                         txn.route, txn.held_ms; where there is no pool, txn.refusal says why
--   http-req lua.affinity with gateway_affinity: sets txn.affinity (what the request belongs to) and txn.home (the copy of its
--                         pool that is to have it), where there is one
--   service lua.models    GET /v1/models and /v1/models/NAME
--   service lua.metrics   for Prometheus;  `show gateway` on HAProxy's socket: for people
--   service lua.catalogue the workers and their models as JSON, for programs
--
-- GATEWAY_ROUTING names the file with the workers and settings, which the role writes.

local affinity = require("affinity")
local asked = require("asked")
local catalogue = require("catalogue")
local routes = require("routes")
local json = require("cjson")

local file = assert(io.open(os.getenv("GATEWAY_ROUTING")))
local settings = json.decode(file:read("a"))
file:close()
settings.pools = math.floor(settings.pools)
local keys = Map.new(settings.keys, Map._str)

-- How often a worker is looked at, how often it is asked for its models, how long it may take to answer, and how often it may
-- fail before its models count as unknown.
local LOOK_MS = 50
-- With dozens of workers each can wait a little, as a look makes a list of all that HAProxy knows of it.
local LOOK_MS_PER_WORKER = 2
local READ_MS = 2000
local AGAIN_MS = 100
local PATIENCE_SECONDS = 2
local CONNECT_MS = 1000
local FAILURES = 2
local LONGEST_ANSWER = 4194304
local UNREACHABLE = "no connection"
-- How often caps are divided anew among the pools of a worker.
local DIVIDE_MS = 50
-- How long HAProxy may take from giving a request its place to counting it among those in flight.
local COUNTED_MS = 40
-- How long a request that found nobody in a pool counts as one that asks for a place there.
local WANTED_MS = 1000
-- A held request looks for a worker this often; with many of them each can wait a little longer.
local SHORTEST_MS, LONGEST_MS, MS_PER_REQUEST = 25, 250, 0.25
-- A process that has just begun has checked every worker by then: the first checks are spread over `inter` of haproxy.cfg,
-- and one of a host without power takes `timeout check`.
local FIRST_CHECK_MS = 3000
-- HAProxy makes a long list to tell whether it is being replaced.
local ASK_MS = 100

local counts = { held = 0, expired = 0, held_ms = 0, restarts = 0, left_out = 0 }
-- Those for warm workers are the rest of what the pools got.
local by_route = { possibly = 0, cold = 0, spill = 0 }
local by_refusal = { broken = 0, no_model = 0, unknown_model = 0, no_worker = 0, no_place = 0 }
-- Request to the moment of its last look. One whose client has gone looks no more, and nobody is told of that.
local looking = {}

local function now_ms()
  local now = core.now()
  return now.sec * 1000 + now.usec / 1000
end

local started
core.register_init(function()
  started = now_ms()
end)

-- After a reload the old process checks no worker any more; its successor takes what is held here.
local replaced, asked_at = false, 0
local function is_replaced(now)
  if now - asked_at > ASK_MS then
    asked_at = now
    replaced = core.get_info().Stopping == 1
  end
  return replaced
end

-- ---------------------------------------------------------------- the workers and the plan

local function add_aliases(names)
  for alias, name in pairs(settings.aliases) do
    if names[name] then
      names[alias] = true
    end
  end
end

-- Further names that clients may use for these.
local function add_names(names, kind)
  local short = {}
  for name in pairs(names) do
    short[#short + 1] = catalogue.short_name(kind, name)
  end
  for _, name in ipairs(short) do
    names[name] = true
  end
  add_aliases(names)
end

local workers = settings.workers
for index, worker in ipairs(workers) do
  worker.index = index
  -- The library makes every number one with a fraction, which HAProxy does not take.
  worker.weight, worker.max_requests = math.floor(worker.weight), math.floor(worker.max_requests)
  worker.key = worker.key or ""
  worker.state = "unread"
  worker.warm, worker.cold, worker.entries = {}, {}, {}
  worker.failures = 0
  -- Number of a pool to the part of the cap that it has.
  worker.shares, worker.divided_at = {}, 0
  for _, name in ipairs(worker.models) do
    worker.warm[name] = true
  end
  add_names(worker.warm, worker.kind)
  -- Number of a pool to the moment when it last had a place of the worker's.
  worker.had_at = {}
end

local plan
local applied = {}
-- Number of a pool to the moment when a request found nobody there.
local wanted_at = {}
-- The list of models, and its entries by name.
local list, entries = catalogue.list({}), {}

local function belongs(pool, worker)
  for _, index in ipairs(pool and pool.members or {}) do
    if index == worker.index then
      return true
    end
  end
  return false
end

-- Does a worker that belongs to the pool serve there now? See routes.lua for who does.
local function member_serves(pool, worker)
  if pool.kind == "failed" then
    return worker.state == "failed"
  end
  return worker.state == "read" or worker.state == "failed" and not pool.told
end

local function serves(pool, worker)
  return belongs(pool, worker) and member_serves(pool, worker)
end

-- What there is to do in a pool.
local function waits(number)
  local stats = core.backends["pool" .. number]:get_stats()
  return stats.qcur > 0 and "queue" or stats.scur > 0 and "busy" or nil
end

-- Tells HAProxy what is new about a worker's place in a pool.
local function apply(number, worker, share)
  local name = "pool" .. number
  local server = core.backends[name].servers[worker.name]
  local before = applied[name .. worker.name] or { weight = 0, share = worker.max_requests }
  local pool = plan.pools[number]
  local after = {
    checked = belongs(pool, worker),
    weight = share > 0 and serves(pool, worker) and worker.weight or 0,
    share = math.max(share, 1),
  }
  if after.checked ~= before.checked then
    if after.checked then
      server:check_enable()
    else
      server:check_disable()
    end
  end
  if after.weight ~= before.weight then
    if after.weight > 0 then
      -- While it has no weight yet: HAProxy, as late as 3.0, sends a server that comes up what waits without counting it, and
      -- set_maxconn would send it as much again.
      server:check_force_up()
    end
    server:set_weight(tostring(after.weight))
  end
  -- This also makes HAProxy look into the queue, which a weight alone does not.
  if after.share ~= before.share or after.weight ~= before.weight then
    server:set_maxconn(tostring(after.share))
  end
  applied[name .. worker.name] = after
end

-- The pools among which a worker's cap is divided, in order: those that it belongs to, and such as it has left without having
-- ended all their requests.
local function pools_of(worker)
  local numbers = {}
  for number = 1, settings.pools do
    if worker.shares[number] or belongs(plan.pools[number], worker) then
      numbers[#numbers + 1] = number
    end
  end
  return numbers
end

local function divide(worker)
  local numbers, shares = worker.pools, worker.shares
  local only = #numbers == 1 and belongs(plan.pools[numbers[1]], worker) and numbers[1]
  if only then
    if shares[only] ~= worker.max_requests then
      shares[only] = worker.max_requests
      apply(only, worker, shares[only])
    end
    return
  end
  local now = now_ms()
  if now - worker.divided_at < COUNTED_MS then
    return
  end
  -- At once, since HAProxy may let another task run at any point of this one.
  worker.divided_at = now
  local left_one = false
  local current, in_flight, wanted, places, demands, rested = {}, {}, {}, {}, {}, {}
  for place, number in ipairs(numbers) do
    local name = "pool" .. number
    local stats = core.backends[name].servers[worker.name]:get_stats()
    current[place], in_flight[place], wanted[place] = shares[number] or 0, stats.scur, 0
    if serves(plan.pools[number], worker) then
      local asked_for = now - (wanted_at[number] or 0) < WANTED_MS and 1 or 0
      places[#places + 1] = place
      demands[#places] = stats.scur + stats.qcur + core.backends[name]:get_stats().qcur + asked_for
      rested[#places] = now - (worker.had_at[number] or 0)
    elseif current[place] + stats.scur + stats.qcur == 0 and not belongs(plan.pools[number], worker) then
      shares[number], left_one = nil, true
    end
  end
  for index, share in ipairs(routes.shares(worker.max_requests, demands, rested)) do
    wanted[places[index]] = share
  end
  for place, share in ipairs(routes.next_shares(worker.max_requests, current, wanted, in_flight)) do
    local number = numbers[place]
    if share > 0 then
      worker.had_at[number] = now
    end
    if shares[number] then
      -- Who looks meanwhile finds a place, or that there is none.
      shares[number] = math.min(shares[number], share)
      apply(number, worker, share)
      shares[number] = share
    end
  end
  if left_one then
    worker.pools = pools_of(worker)
  end
end

local function make_list()
  entries = {}
  for _, worker in ipairs(workers) do
    if worker.state == "read" then
      for name, entry in pairs(worker.entries) do
        entries[name] = entries[name] or entry
      end
    end
  end
  for alias, name in pairs(settings.aliases) do
    if entries[name] and not entries[alias] then
      entries[alias] = {}
      for key, value in pairs(entries[name]) do
        entries[alias][key] = value
      end
      entries[alias].id = alias
    end
  end
  list = catalogue.list(entries)
end

-- What HAProxy itself can look up: the pool of each model that one alone serves, and the key that a pool asks for.
local looked_up = {}

local function fill_tables()
  local found = {}
  for name, route in pairs(plan.models) do
    if #route.warm == 1 and plan.pools[route.warm[1]].told and settings.spill_after == 0 then
      found[name] = "pool" .. route.warm[1]
    end
  end
  for name in pairs(looked_up) do
    if not found[name] then
      core.del_map(settings.routes, name)
    end
  end
  for name, pool in pairs(found) do
    if looked_up[name] ~= pool then
      core.set_map(settings.routes, name, pool)
    end
  end
  looked_up = found
  for number = 1, settings.pools do
    local pool = plan.pools[number]
    local name = pool and pool.key or ""
    local secret, before = name ~= "" and keys:lookup(name), keys:lookup("pool" .. number)
    if secret and secret ~= before then
      core.set_map(settings.keys, "pool" .. number, secret)
    elseif not secret and before then
      core.del_map(settings.keys, "pool" .. number)
    end
  end
end

-- After anything about the workers has changed.
local function replan()
  local former = plan
  plan = routes.plan(workers, settings.pools, former, waits)
  if plan.left_out > 0 and plan.left_out ~= counts.left_out then
    core.Alert(
      string.format("gateway: %d sets of workers have no pool of their own; raise gateway_pools", plan.left_out)
    )
  end
  counts.left_out = plan.left_out
  for _, worker in ipairs(workers) do
    local numbers = pools_of(worker)
    for _, number in ipairs(numbers) do
      worker.shares[number] = worker.shares[number] or 0
    end
    worker.pools = numbers
    for number = 1, settings.pools do
      apply(number, worker, worker.shares[number] or worker.max_requests)
    end
    divide(worker)
  end
  fill_tables()
  make_list()
end

-- ---------------------------------------------------------------- reading what a worker has

-- GET by plain HTTP; the body, or an error.
local function get(server, path, key, reading)
  local address, port = server:get_addr():match("^(.*):(%d+)$")
  local socket = core.tcp()
  socket:settimeout(PATIENCE_SECONDS)
  local function must(value, problem)
    if not value then
      socket:close()
      error(problem or "no answer", 0)
    end
    return value
  end
  must(socket:connect(address, tonumber(port)), UNREACHABLE)
  reading.connected = true
  local secret = key ~= "" and keys:lookup(key)
  must(socket:send(table.concat({
    "GET " .. path .. " HTTP/1.0",
    "Host: localhost",
    secret and "Authorization: Bearer " .. secret or "Accept: application/json",
    "Connection: close",
    "\r\n",
  }, "\r\n")))
  local status = must(socket:receive("*l")):match("^HTTP/1%.%d (%d+)")
  local length
  repeat
    local line = must(socket:receive("*l")):gsub("\r$", "")
    length = tonumber(line:lower():match("^content%-length:%s*(%d+)$")) or length
  until line == ""
  if status ~= "200" then
    must(nil, "status " .. tostring(status))
  end
  if length and length > LONGEST_ANSWER then
    must(nil, "an answer of " .. length .. " bytes")
  end
  local body = length == 0 and "" or must(socket:receive(length or "*a"))
  socket:close()
  return body
end

-- What the worker has now: warm, cold (name to true) and what is listed (name to entry); raises an error.
local function models_of(worker, reading)
  local server = core.backends.workers.servers[worker.name]
  local places = catalogue.places[worker.kind]
  local loaded, loadable = catalogue.models_in(places.loaded, get(server, places.loaded, worker.key, reading))
  if places.loadable and worker.on_demand then
    local all, others = catalogue.models_in(places.loadable, get(server, places.loadable, worker.key, reading))
    for name, entry in pairs(others) do
      all[name] = entry
    end
    loadable = all
  end
  local warm, cold, listed = {}, {}, {}
  for name, entry in pairs(loaded) do
    warm[name], listed[name] = true, entry
  end
  for name, entry in pairs(worker.on_demand and loadable or {}) do
    if not warm[name] then
      cold[name], listed[name] = true, entry
    end
  end
  for _, names in ipairs({ warm, cold }) do
    add_names(names, worker.kind)
  end
  return warm, cold, listed
end

-- Does HAProxy take it for live? Nil where it does not know yet: at first it takes each for live, until enough checks failed.
local function is_live(worker)
  local stats = core.backends.workers.servers[worker.name]:get_stats()
  local status, last_check = tostring(stats.status), tostring(stats.check_status)
  if status:find("^UP") and worker.state == "unread" and not last_check:find("OK") then
    return nil
  end
  return status:find("^UP") ~= nil
end

local function same_names(one, other)
  for name in pairs(one) do
    if not other[name] then
      return false
    end
  end
  for name in pairs(other) do
    if not one[name] then
      return false
    end
  end
  return true
end

-- A task that raises an error would end without a word.
local function guarded(step, ...)
  local understood, problem = xpcall(step, debug.traceback, ...)
  if not understood then
    counts.restarts, counts.failure = counts.restarts + 1, tostring(problem)
    core.Alert("gateway: " .. counts.failure)
  end
  return understood
end

local function for_ever(pause, step)
  core.register_task(function()
    while not is_replaced(now_ms()) do
      core.msleep(guarded(step) and pause or 1000)
    end
  end)
end

-- What comes of asking a worker for its models.
local function conclude(worker, reading)
  local now, changed = now_ms(), false
  worker.reading = nil
  if reading.understood then
    local warm, cold = reading.warm, reading.cold
    changed = worker.state ~= "read" or not same_names(warm, worker.warm) or not same_names(cold, worker.cold)
    worker.warm, worker.cold, worker.entries = warm, cold, reading.listed
    worker.state, worker.failures, worker.problem, worker.read_at = "read", 0, nil, now
    worker.next_read = now + READ_MS
  else
    worker.failures, worker.problem = worker.failures + 1, reading.problem
    local state = worker.problem == UNREACHABLE and "unreachable" or "failed"
    if worker.failures >= FAILURES and worker.state ~= state then
      worker.state, changed = state, true
      core.Warning(string.format("gateway: %s does not tell its models: %s", worker.name, worker.problem))
    end
    worker.next_read = now + (worker.state == "failed" and READ_MS or AGAIN_MS)
  end
  if changed then
    replan()
  end
end

-- Beside the looks at a worker, since HAProxy 3.0 tries a refused connection again and again, three seconds long.
local function begin_reading(worker)
  local reading = { began = now_ms() }
  worker.reading = reading
  core.register_task(function()
    reading.understood, reading.warm, reading.cold, reading.listed = pcall(models_of, worker, reading)
    reading.problem = not reading.understood and tostring(reading.warm) or nil
    -- It may have gone meanwhile, or been given up.
    if worker.reading == reading then
      guarded(conclude, worker, reading)
    end
  end)
end

local function look_at(worker)
  local now = now_ms()
  local live = is_live(worker)
  if live == nil then
    return
  end
  if not live then
    if worker.state ~= "down" then
      worker.state, worker.failures, worker.problem, worker.reading = "down", 0, nil, nil
      replan()
    end
    return
  end
  if worker.state == "down" then
    worker.state, worker.next_read = "unread", 0
  end
  local reading = worker.reading
  if not reading and now >= (worker.next_read or 0) then
    begin_reading(worker)
  elseif reading and not reading.connected and now - reading.began > CONNECT_MS then
    reading.problem = UNREACHABLE
    conclude(worker, reading)
  end
end

core.register_init(function()
  guarded(replan)
end)
for _, worker in ipairs(workers) do
  for_ever(math.max(LOOK_MS, LOOK_MS_PER_WORKER * #workers), function()
    look_at(worker)
  end)
end
-- Of each announced model the time without a live worker.
local away_ms, away_at = {}, nil
for _, worker in ipairs(workers) do
  for _, name in ipairs(worker.models) do
    away_ms[name] = 0
  end
end

local function count_away()
  local now = now_ms()
  local served = {}
  for _, worker in ipairs(workers) do
    if worker.state == "read" or worker.state == "failed" then
      for name in pairs(worker.warm) do
        served[name] = true
      end
    end
  end
  for name, sum in pairs(away_ms) do
    if not served[name] then
      away_ms[name] = sum + now - (away_at or now)
    end
  end
  away_at = now
end

for_ever(DIVIDE_MS, function()
  count_away()
  for _, worker in ipairs(workers) do
    divide(worker)
  end
  for number, pool in pairs(plan.pools) do
    if pool.is_rest and not waits(number) then
      return replan()
    end
  end
end)

-- ---------------------------------------------------------------- requests

-- Has every worker that lives told, or failed to tell, what it has? And how many have told it?
local function is_settled()
  local settled, told = true, 0
  for _, worker in ipairs(workers) do
    settled = settled and worker.state ~= "unread"
    told = told + (worker.state == "read" and 1 or 0)
  end
  return settled, told
end

-- Is there a worker in one of these pools that serves there and lacks nothing but a place, since its other pools have them all?
local function any_full(numbers, only_told)
  for _, number in ipairs(numbers) do
    local pool = plan.pools[number]
    for _, index in ipairs(pool and (pool.told or not only_told) and pool.members or {}) do
      local worker = workers[index]
      if (worker.shares[number] or 0) == 0 and worker.weight > 0 and member_serves(pool, worker) then
        return true
      end
    end
  end
  return false
end

-- The pool and class for a model; nil where there is none now, and then whether it only lacks a place.
local function choose(fetch, model)
  local route = plan.models[model]
  local is_only = settings.spill_after == 0 and route and #route.warm == 1
  local number, class = routes.choose(plan, model, settings.spill_after, function(number)
    local name = "pool" .. number
    local live = fetch:nbsrv(name)
    -- What else there is to know is for a choice, which most have not.
    if live == 0 then
      wanted_at[number] = now_ms()
    end
    if live == 0 or is_only then
      return live, 0, 1, 0
    end
    local waiting = fetch:queue(name)
    return live, fetch:be_conn(name), waiting > 0 and 0 or fetch:be_conn_free(name), waiting
  end)
  if not route or number and class ~= "possibly" and class ~= "cold" then
    return number, class, false
  end
  -- Who has it loaded and is only full comes before who may have it, or would have to load it.
  local may_spill = class == "cold" and settings.spill_after > 0
  if any_full(route.warm, number ~= nil) and not may_spill then
    return nil, nil, true
  end
  return number, class, not number and any_full(route.cold)
end

-- Nobody who could be asked has this model, or ever had.
local function is_unknown(model)
  if plan.models[model] then
    return false
  end
  local settled, told = is_settled()
  return settled and told > 0
end

local function waiting_count()
  local count, now = 0, now_ms()
  for request, moment in pairs(looking) do
    if now - moment > LONGEST_MS * 4 then
      looking[request] = nil
    else
      count = count + 1
    end
  end
  return count
end

local function refuse(txn, why)
  by_refusal[why] = by_refusal[why] + 1
  txn:set_var("txn.refusal", why)
end

-- Waits until somebody serves the model, at most so many seconds, or for a place at somebody who does, as long as in a queue;
-- a pool and its class, or nil and why not.
local function hold(txn, model, seconds, began, full)
  local request = {}
  counts.held = counts.held + 1
  looking[request] = began
  local pause = math.floor(math.min(LONGEST_MS, math.max(SHORTEST_MS, waiting_count() * MS_PER_REQUEST)))
  local number, class, problem
  -- Since when it has been waiting for a place, or for somebody live.
  local now, since, was_full = began, began, full
  repeat
    core.msleep(pause)
    now = now_ms()
    looking[request] = now
    number, class, full = choose(txn.f, model)
    if full ~= was_full then
      since, was_full = now, full
    end
    if not number and is_unknown(model) then
      problem = "unknown_model"
    elseif full then
      problem = now - since >= 1000 * settings.queue_timeout and "no_place" or nil
    elseif not number and now - since >= 1000 * seconds and (is_settled() or now - began >= FIRST_CHECK_MS) then
      -- However short its patience: while a worker that has just come is asked for its models, it may be the one.
      problem = "no_worker"
      counts.expired = counts.expired + 1
    end
  until number or problem or is_replaced(now)
  looking[request] = nil
  counts.held_ms = counts.held_ms + (now - began)
  txn:set_var("txn.held_ms", math.floor(now - began))
  return number, class, problem
end

core.register_action("route", { "http-req" }, function(txn)
  local model, problem = asked.model(txn.sf:req_body(), txn.sf:req_hdr("content-type"))
  if not model then
    return refuse(txn, problem)
  end
  txn:set_var("txn.model", model)
  local now = now_ms()
  local number, class, full = choose(txn.f, model)
  if not number then
    local seconds = txn:get_var("txn.hold_seconds") or 0
    if is_unknown(model) then
      return refuse(txn, "unknown_model")
    elseif seconds == 0 and not full and is_settled() then
      return refuse(txn, "no_worker")
    end
    number, class, problem = hold(txn, model, seconds, now, full)
    if problem then
      return refuse(txn, problem)
    elseif not number then
      return
    end
  end
  if by_route[class] then
    by_route[class] = by_route[class] + 1
  end
  txn:set_var("txn.route", class)
  txn:set_var("txn.pool", "pool" .. number)
end)

-- ---------------------------------------------------------------- affinity

core.register_action("affinity", { "http-req" }, function(txn)
  local function digest(text)
    return txn.c:xxh64(text)
  end
  local model, pool = txn:get_var("txn.model") or "", txn:get_var("txn.pool")
  local key = affinity.key(txn.sf:path(), txn.sf:req_hdr("x-session-id"), model, txn.sf:req_body(), digest)
  if not key then
    return
  end
  txn:set_var("txn.affinity", key)
  local copies, planned = {}, plan.pools[tonumber(pool:match("%d+$"))]
  for _, index in ipairs(planned and planned.members or {}) do
    local worker = workers[index]
    local stats = core.backends[pool].servers[worker.name]:get_stats()
    -- Naming a copy would also send a request to one that drains.
    if is_live(worker) and stats.status:find("^UP") and stats.weight > 0 then
      copies[#copies + 1] = {
        name = worker.name,
        weight = stats.weight,
        in_flight = stats.scur,
        free = stats.slim - stats.scur,
      }
    end
  end
  local home = affinity.home(key, copies, settings.affinity_bound, digest)
  if home then
    txn:set_var("txn.home", home)
  end
end)

-- ---------------------------------------------------------------- answers

local function send(applet, status, content_type, body, headers)
  applet:set_status(status)
  applet:add_header("content-type", content_type)
  applet:add_header("content-length", #body)
  for name, value in pairs(headers or {}) do
    applet:add_header(name, value)
  end
  applet:start_response()
  if applet.method ~= "HEAD" then
    applet:send(body)
  end
end

local function openai_error(message, kind, code)
  return json.encode({ error = { message = message, type = kind, param = json.null, code = code } })
end

local function decoded(text)
  return (text:gsub("%%(%x%x)", function(digits)
    return string.char(tonumber(digits, 16))
  end))
end

core.register_service("models", "http", function(applet)
  local settled, told = is_settled()
  while not settled and now_ms() - started < FIRST_CHECK_MS do
    core.msleep(SHORTEST_MS)
    settled, told = is_settled()
  end
  local name = applet.path:match("^/v1/models/(.+)$")
  local entry = name and entries[decoded(name)]
  if told == 0 or name and not entry and not settled then
    local body = openai_error("No worker is live. Please try again later.", "server_error", "service_unavailable")
    return send(applet, 503, "application/json", body, { ["retry-after"] = string.format("%d", settings.retry_after) })
  end
  if not name then
    return send(applet, 200, "application/json", list)
  end
  if entry then
    return send(applet, 200, "application/json", json.encode(entry))
  end
  by_refusal.unknown_model = by_refusal.unknown_model + 1
  local message = "There is no model of this name. GET /v1/models lists those that there are."
  send(applet, 404, "application/json", openai_error(message, "invalid_request_error", "model_not_found"))
end)

local function family(lines, name, kind, meaning, values)
  local full = "gateway_" .. name
  lines[#lines + 1] = string.format("# HELP %s %s", full, meaning)
  lines[#lines + 1] = string.format("# TYPE %s %s", full, kind)
  if type(values) ~= "table" then
    values = { [""] = values }
  end
  for _, label in ipairs(routes.sorted_keys(values)) do
    lines[#lines + 1] = string.format("%s%s %s", full, label, values[label])
  end
end

local function labelled(label, values)
  local found = {}
  for name, value in pairs(values) do
    found[string.format('{%s="%s"}', label, (name:gsub('[\\"]', "\\%0")))] = value
  end
  return found
end

local function size(set)
  local count = 0
  for _ in pairs(set) do
    count = count + 1
  end
  return count
end

local function of_workers(value)
  local found = {}
  for _, worker in ipairs(workers) do
    found[worker.name] = value(worker)
  end
  return labelled("worker", found)
end

local function warm_requests()
  local count = -by_route.possibly - by_route.cold - by_route.spill
  for number = 1, settings.pools do
    count = count + core.backends["pool" .. number]:get_stats().stot
  end
  return math.floor(count)
end

core.register_service("metrics", "http", function(applet)
  local lines, now = {}, now_ms()
  family(
    lines,
    "held_requests",
    "gauge",
    "Requests that wait for a worker to become live, or for one whose other models have all its places.",
    waiting_count()
  )
  family(lines, "held_requests_total", "counter", "Requests that had to wait for that.", counts.held)
  family(lines, "hold_expired_total", "counter", "Those of them that no worker came for in time.", counts.expired)
  family(lines, "held_seconds_total", "counter", "Time that requests have waited.", counts.held_ms / 1000)
  family(
    lines,
    "routed_requests_total",
    "counter",
    "Requests sent on: to workers that had the model loaded (warm), that could not tell (possibly), that had to load it"
      .. " (cold), or had to though others had it loaded, but no place (spill).",
    labelled("route", {
      warm = warm_requests(),
      possibly = by_route.possibly,
      cold = by_route.cold,
      spill = by_route.spill,
    })
  )
  family(
    lines,
    "refused_requests_total",
    "counter",
    "Requests refused: broken JSON, no model named, a model that nobody has, or no live worker, or no place at one, in time.",
    labelled("reason", by_refusal)
  )
  local away = {}
  for name, sum in pairs(away_ms) do
    away[name] = sum / 1000
  end
  family(
    lines,
    "model_away_seconds_total",
    "counter",
    "Time without a live worker that has the model, of the models that the inventory names.",
    labelled("model", away)
  )
  family(lines, "models", "gauge", "Models listed.", size(entries))
  family(
    lines,
    "worker_models",
    "gauge",
    "Models that each worker has loaded, as it told last.",
    of_workers(function(worker)
      return size(worker.entries)
    end)
  )
  family(
    lines,
    "worker_models_read",
    "gauge",
    "Whether the worker is live and tells its models.",
    of_workers(function(worker)
      return worker.state == "read" and 1 or 0
    end)
  )
  family(
    lines,
    "worker_models_age_seconds",
    "gauge",
    "Time since each worker told its models; -1 when it never has.",
    of_workers(function(worker)
      return worker.read_at and (now - worker.read_at) / 1000 or -1
    end)
  )
  family(lines, "sets_without_pool", "gauge", "Sets of workers that gateway_pools has no place for.", counts.left_out)
  family(lines, "task_failures_total", "counter", "Errors in the gateway's own program.", counts.restarts)
  send(applet, 200, "text/plain; version=0.0.4", table.concat(lines, "\n") .. "\n")
end)

core.register_service("catalogue", "http", function(applet)
  local found = {}
  for index, worker in ipairs(workers) do
    found[index] = {
      name = worker.name,
      address = worker.address,
      weight = worker.weight,
      state = worker.state,
      warm = routes.sorted_keys(worker.warm),
      cold = routes.sorted_keys(worker.cold),
    }
  end
  send(applet, 200, "application/json", json.encode({ workers = found }))
end)

local STATES = {
  down = "does not take requests",
  unread = "is being asked for its models",
  read = "live",
  failed = "live, does not tell its models",
  unreachable = "live, but lets nobody in",
}

core.register_cli({ "show", "gateway" }, "show gateway: the workers, and who has which model", function(applet)
  local lines = { string.format("held: %d", waiting_count()), "", "workers" }
  if counts.failure then
    table.insert(lines, 1, "last failure of this program: " .. counts.failure)
  end
  for _, worker in ipairs(workers) do
    local state = STATES[worker.state] .. (worker.problem and ": " .. worker.problem or "")
    lines[#lines + 1] = string.format("  %-24s %-10s %s", worker.name, worker.kind, state)
  end
  lines[#lines + 1] = ""
  lines[#lines + 1] = "models"
  local function members(numbers)
    local found = {}
    for _, number in ipairs(numbers) do
      for _, index in ipairs(plan.pools[number].members) do
        found[#found + 1] = workers[index].name .. (workers[index].state == "down" and " (down)" or "")
      end
    end
    return table.concat(found, ", ")
  end
  for _, name in ipairs(routes.sorted_keys(plan.models)) do
    local route = plan.models[name]
    local text = members(route.warm)
    if #route.cold > 0 then
      text = text .. (text ~= "" and "; " or "") .. "on demand: " .. members(route.cold)
    end
    lines[#lines + 1] = string.format("  %-40s %s", name, text)
  end
  applet:send(table.concat(lines, "\n") .. "\n")
end)
