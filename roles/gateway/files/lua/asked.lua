-- SPDX-License-Identifier: GPL-3.0-or-later
-- What a request asks for: the model's name in a JSON body or in a form. Knows nothing of HAProxy.
--
-- A body may have megabytes, and reading all of it as JSON takes milliseconds. Nearly always the name stands near its
-- beginning or its end, behind a key that a plain search finds; then only the short side needs to be understood, to be
-- sure that the key is one of the outermost object. All else is left to the library.

local json = require("cjson")

local asked = {}

local NEAR = 65536
local MANY = 4
local QUOTE, BACKSLASH = 34, 92

-- How many more brackets a stretch of JSON opens than it closes; nil where it ends inside a string, or closes more than
-- `held` brackets before its last one.
local function depth(text, held)
  local level, from = 0, 1
  while true do
    local at = text:find('["%[%]{}]', from)
    if not at then
      return level
    end
    local character = text:sub(at, at)
    from = at + 1
    if character == '"' then
      repeat
        local ending = text:find('["\\]', from)
        if not ending then
          return nil
        end
        local closes = text:byte(ending) == QUOTE
        from = ending + (closes and 1 or 2)
      until closes
    elseif character == "[" or character == "{" then
      level = level + 1
    else
      level = level - 1
      if held and level < 0 and (level < -held or text:find("[^%s]", from)) then
        return nil
      end
    end
  end
end

-- Is what stands before `first` and after `last` the outermost object's? Looked at from the shorter side.
local function is_outermost(body, first, last)
  if first <= NEAR and first <= #body - last then
    return depth(body:sub(1, first - 1)) == 1
  elseif #body - last <= NEAR then
    return depth(body:sub(last + 1), 1) == -1
  end
  return false
end

local function searched(body)
  local from = 1
  for _ = 1, MANY do
    local first, last = body:find('"model"', from, true)
    if not first then
      return nil
    end
    from = last + 1
    if body:byte(first - 1) ~= BACKSLASH then
      local name, after = body:match('^%s*:%s*"([^"\\]*)"()', from)
      if name and is_outermost(body, first, after - 1) then
        return name
      end
    end
  end
  return nil
end

-- The value of "model" of a JSON object; else nil and what is wrong: "broken" or "no_model".
function asked.in_json(body)
  if not body:find("^%s*{") then
    return nil, "broken"
  end
  local name = searched(body)
  if not name then
    local understood, value = pcall(json.decode, body)
    if not understood then
      return nil, "broken"
    end
    name = value.model
  end
  if type(name) ~= "string" or name == "" then
    return nil, "no_model"
  end
  return name
end

-- The value of the field "model" of a form with parts (multipart/form-data); else nil and what is wrong.
function asked.in_form(body, content_type)
  local boundary = content_type:match('boundary="([^"]+)"') or content_type:match("boundary=([^;%s]+)")
  if not boundary then
    return nil, "broken"
  end
  local delimiter = "--" .. boundary
  local first, last = body:find(delimiter, 1, true)
  while first and body:sub(last + 1, last + 2) ~= "--" do
    local _, head_end = body:find("\r\n\r\n", last, true)
    if not head_end then
      return nil, "broken"
    end
    local next_first, next_last = body:find("\r\n" .. delimiter, head_end - 1, true)
    if not next_first then
      return nil, "broken"
    end
    if body:sub(last + 1, head_end):find('[;%s][Nn]ame="?model"?[;%s]') then
      local name = body:sub(head_end + 1, next_first - 1):match("^%s*(.-)%s*$")
      if name == "" then
        return nil, "no_model"
      end
      return name
    end
    first, last = next_first, next_last
  end
  return nil, first and "no_model" or "broken"
end

-- The model that a request with this body asks for; else nil and what is wrong.
function asked.model(body, content_type)
  if content_type and content_type:lower():find("multipart/form-data", 1, true) then
    return asked.in_form(body, content_type)
  end
  return asked.in_json(body)
end

return asked
