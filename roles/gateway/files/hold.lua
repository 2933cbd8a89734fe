-- SPDX-License-Identifier: GPL-3.0-or-later
-- Holds a request while no worker takes any, instead of refusing it; HAProxy itself queues only for workers that are live.
--
-- The action lua.hold returns as soon as a worker of the backend `workers` takes requests, or when the time is over that
-- txn.hold_seconds says (then HAProxy finds no worker, and answers 503). It sets txn.held_ms for the log.
-- The service lua.hold_metrics tells how many were held, for Prometheus.

local SHORTEST_MS = 25
local LONGEST_MS = 250
-- So many held requests look for a worker so often that each can wait a little longer.
local MS_PER_REQUEST = 0.25
-- A process that has just begun takes every worker for live. By then it has looked at each: the first looks are spread over
-- `inter` of haproxy.cfg, and one at a host without power takes as long again.
local FIRST_LOOK_MS = 1200
-- HAProxy makes a long list to tell whether it is being replaced.
local ASK_MS = 100

local counts = { held = 0, expired = 0, milliseconds = 0 }
-- Request to the moment of its last look. One whose client has gone looks no more, and nobody is told of that.
local looking = {}

local function now_ms()
  local now = core.now()
  return now.sec * 1000 + now.usec / 1000
end

local function waiting()
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

local started
core.register_init(function()
  started = now_ms()
end)

-- After a reload the old process checks no worker any more; its successor takes what is held here.
local replaced, asked = false, 0
local function is_replaced(now)
  if now - asked > ASK_MS then
    asked = now
    replaced = core.get_info().Stopping == 1
  end
  return replaced
end

local function may_go_on(txn, now)
  return now - started > FIRST_LOOK_MS and txn.f:nbsrv("workers") > 0 or is_replaced(now)
end

core.register_action("hold", { "http-req" }, function(txn)
  local began = now_ms()
  local seconds = txn:get_var("txn.hold_seconds") or 0
  if seconds == 0 or may_go_on(txn, began) then
    return
  end
  local limit = began + 1000 * seconds
  local now = began
  local request = {}
  counts.held = counts.held + 1
  looking[request] = now
  local pause = math.floor(math.min(LONGEST_MS, math.max(SHORTEST_MS, waiting() * MS_PER_REQUEST)))
  local served = false
  while not served and now < limit do
    core.msleep(pause)
    now = now_ms()
    looking[request] = now
    served = may_go_on(txn, now)
  end
  looking[request] = nil
  counts.milliseconds = counts.milliseconds + (now - began)
  if not served then
    counts.expired = counts.expired + 1
  end
  txn:set_var("txn.held_ms", math.floor(now - began))
end)

local function family(name, kind, meaning, value)
  local full = "gateway_" .. name
  return string.format("# HELP %s %s\n# TYPE %s %s\n%s %s\n", full, meaning, full, kind, full, value)
end

core.register_service("hold_metrics", "http", function(applet)
  local body = family("held_requests", "gauge", "Requests that wait for a worker to become live.", waiting())
    .. family("held_requests_total", "counter", "Requests that had to wait for that.", counts.held)
    .. family("hold_expired_total", "counter", "Those of them that no worker came for in time.", counts.expired)
    .. family("held_seconds_total", "counter", "Time that requests have waited.", counts.milliseconds / 1000)
  applet:set_status(200)
  applet:add_header("content-type", "text/plain; version=0.0.4")
  applet:add_header("content-length", #body)
  applet:start_response()
  applet:send(body)
end)
