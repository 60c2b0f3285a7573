"""Lua scripts that `Redis` runs in the server. Each is one atomic step of its accounting.

Three keys account for the blocks: `used`, a sorted set of their keys by time of last use; `index`,
the same keys in byte order; and `sizes`, a hash of each block's bytes with their sum as `total`.
The server may drop any key by itself: a script that finds a block missing removes its entries, and
if one of the three keys is missing, the next script rebuilds it from the others.
"""

from __future__ import annotations

# KEYS: used, index, sizes. ARGV[1]: prefix of all blocks' names.
_COMMON = """
local used, index, sizes = KEYS[1], KEYS[2], KEYS[3]
local base = ARGV[1]
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000

-- Also 0 for a value that is not a string.
local function size_of(key)
  local n = redis.pcall('STRLEN', base .. key)
  return type(n) == 'number' and n or 0
end

local function drop(key)
  redis.call('HDEL', sizes, key)
  redis.call('ZREM', index, key)
  redis.call('ZREM', used, key)
end

-- Removal comes first: a server at maxmemory allows a script's other writes only after one.
local function forget(key)
  local n = redis.call('HGET', sizes, key)
  if n then
    drop(key)
    redis.call('HINCRBY', sizes, 'total', -n)
  end
end

local function add(key, n, when)
  redis.call('HINCRBY', sizes, 'total', n - (redis.call('HGET', sizes, key) or 0))
  redis.call('HSET', sizes, key, n)
  redis.call('ZADD', index, 0, key)
  redis.call('ZADD', used, when, key)
end

local function expire(key, life)
  if life ~= '' then redis.call('PEXPIRE', base .. key, life) end
end

local function counted()
  local n, fields = redis.call('ZCARD', used), redis.call('HLEN', sizes)
  local sum = redis.call('HGET', sizes, 'total')
  local whole = sum and fields == n + 1 or n + fields == 0
  if whole and n == redis.call('ZCARD', index) then return tonumber(sum or 0) end
  local seen = {}
  for _, keys in ipairs({
    redis.call('ZRANGE', used, 0, -1),
    redis.call('ZRANGE', index, 0, -1),
    redis.call('HKEYS', sizes)
  }) do
    for _, key in ipairs(keys) do seen[key] = true end
  end
  seen['total'] = nil
  sum = 0
  for key in pairs(seen) do
    local n = size_of(key)
    if n == 0 then
      drop(key)
    else
      sum = sum + n
      redis.call('HSET', sizes, key, n)
      redis.call('ZADD', index, 0, key)
      redis.call('ZADD', used, 'NX', now, key)
    end
  end
  redis.call('HSET', sizes, 'total', sum)
  return sum
end

local total = counted()

local function gone(key)
  total = total - (redis.call('HGET', sizes, key) or 0)
  forget(key)
end

-- Expired blocks are among the least recently used.
local function sweep()
  while true do
    local key = redis.call('ZRANGE', used, 0, 0)[1]
    if not key or size_of(key) > 0 then return end
    gone(key)
  end
end

local function fit(budget)
  while total > budget do
    local key = redis.call('ZRANGE', used, 0, 0)[1]
    if not key then return end
    redis.call('UNLINK', base .. key)
    gone(key)
  end
end
"""

# ARGV: key, block, budget or '', life in ms or ''.
PUT = (
    _COMMON
    + """
local key, block = ARGV[2], ARGV[3]
local n = size_of(key)
if n == 0 then
  n = #block
  gone(key)
  sweep()
  fit((tonumber(ARGV[4]) or math.huge) - n)
  redis.call('SET', base .. key, block)
end
add(key, n, now)
expire(key, ARGV[5])
return 1
"""
)

# ARGV: life in ms or '', whether to skip keys that are accounted for, keys. Later keys get older
# times of last use, because a block is useless without those before it.
TOUCH = (
    _COMMON
    + """
for place = 4, #ARGV do
  local key = ARGV[place]
  local n = size_of(key)
  if n == 0 then
    forget(key)
  elseif ARGV[3] == '0' or not redis.call('ZSCORE', used, key) then
    add(key, n, now - place / 1000000)
    expire(key, ARGV[2])
  end
end
return 1
"""
)

# ARGV: key.
DELETE = (
    _COMMON
    + """
redis.call('UNLINK', base .. ARGV[2])
forget(ARGV[2])
return 1
"""
)

# ARGV: key, the block's new name, how long it is kept there in ms.
SET_ASIDE = (
    _COMMON
    + """
if redis.call('EXISTS', base .. ARGV[2]) == 1 then
  redis.call('RENAME', base .. ARGV[2], ARGV[3])
  redis.call('PEXPIRE', ARGV[3], ARGV[4])
end
forget(ARGV[2])
return 1
"""
)

# ARGV: first key, last key, most keys. Returns the last key examined, or '' if no more follow, and
# then the keys of existing blocks.
PAGE = (
    _COMMON
    + """
local keys = redis.call('ZRANGEBYLEX', index, ARGV[2], ARGV[3], 'LIMIT', 0, ARGV[4])
local found = {#keys == tonumber(ARGV[4]) and keys[#keys] or ''}
for _, key in ipairs(keys) do
  if size_of(key) > 0 then found[#found + 1] = key else forget(key) end
end
return found
"""
)

# ARGV: budget or '', whether to check all blocks. Returns the bytes freed and the bytes left.
FIT = (
    _COMMON
    + """
sweep()
if ARGV[3] == '1' then
  for _, key in ipairs(redis.call('ZRANGE', used, 0, -1)) do
    if size_of(key) == 0 then gone(key) end
  end
end
local before = total
fit(tonumber(ARGV[2]) or math.huge)
return {before - total, total}
"""
)
