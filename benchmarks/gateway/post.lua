-- SPDX-License-Identifier: GPL-3.0-or-later
-- For wrk: sends one file again and again and prints what wrk found as JSON; arguments: METHOD PATH BODY KEY.
function init(arguments)
  wrk.method = arguments[1]
  wrk.path = arguments[2]
  if arguments[3] ~= "" then
    local file = assert(io.open(arguments[3], "rb"))
    wrk.body = file:read("*a")
    file:close()
  end
  wrk.headers["content-type"] = "application/json"
  wrk.headers["authorization"] = "Bearer " .. arguments[4]
end

function done(summary, latency)
  local errors = summary.errors
  print(string.format(
    '{"requests": %d, "seconds": %.6f, "p50_ms": %.4f, "p99_ms": %.4f, "errors": %d}',
    summary.requests - errors.status, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout
  ))
end
