-- SPDX-License-Identifier: Apache-2.0
-- Written by slurm-health init default from the rules in @site@; run it again after a change there.
-- Returns a function that puts a launcher before the script of a batch job that the rules name. It
-- reads nothing but the job, starts nothing, and waits for nothing.
local before_limit = @before_limit@
local after_limit = @after_limit@
local rules = {
    min_nodes = @min_nodes@,
    gpus = @gpus@,
    partitions = @partitions@,
    accounts = @accounts@,
    min_time_min = @min_time_min@,
    limit_s = @limit_s@, -- no limit: 0
    share = @share@, -- of the job's time limit; any: 0
    opt_out = @opt_out@,
}
local submitted = @submitted@
local own_jobs = "slurm-health-"
local largest = 4 * 1024 * 1024 -- bytes; Slurm's own default
local not_given = 4294967294 -- NO_VAL; what is larger has no limit

local function number(value)
    value = tonumber(value)
    if value == nil or value == not_given then return nil end
    return value
end

local function words(text, pattern)
    local found = {}
    for word in string.gmatch(text or "", pattern) do found[word] = true end
    return found
end

-- An empty set of names names everything; what is not known yet is looked at when the job starts.
local function named(names, chosen)
    if next(names) == nil or next(chosen) == nil then return true end
    for name in pairs(chosen) do
        if names[name] then return true end
    end
    return false
end

local function gpu_text(job)
    local asked = ""
    for _, field in ipairs({ "tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task", "gres" }) do
        local worked, value = pcall(function() return job[field] end)
        if worked and type(value) == "string" then asked = asked .. "," .. value end
    end
    return asked
end

-- The most nodes that the job can be given, as far as it says.
local function most_nodes(job, gpus)
    local most = math.max(number(job.min_nodes) or 1, number(job.max_nodes) or 1, number(job.num_tasks) or 1)
    -- A user writes it, at any length: a pattern that starts anew at each of its letters would hold slurmctld up.
    for each in string.gmatch(gpus, "[^,]+") do
        local count = string.find(each, "gpu", 1, true) and string.match(each, "^.*[:=](%d+)")
        if count then most = math.max(most, tonumber(count)) end
    end
    return most
end

local function default_partition(part_list)
    for _, part in pairs(part_list) do
        if part.flag_default == 1 then return part end
    end
end

local function limit_min(job, part_list)
    local limit = number(job.time_limit)
    if limit then return limit end
    local chosen = job.partition
    local part = chosen and part_list[chosen] or (not chosen and default_partition(part_list))
    return part and (number(part.default_time) or number(part.max_time)) or math.huge
end

local function why_not(job, part_list)
    local script = job.script
    if script == nil or script == "" then return "no batch script" end
    if number(job.het_job_offset) then return "the components of a heterogeneous job cannot be checked" end
    if string.sub(script, 1, 2) ~= "#!" then return "its script has no interpreter" end
    if #script + #before_limit + #after_limit + 20 > largest then return "its script is too large" end
    if job.container ~= nil then return "its script runs in a container" end
    if string.find(script, submitted, 1, true) then return "slurm-health sbatch has it checked" end
    if string.sub(job.name or "", 1, #own_jobs) == own_jobs then return "a job of slurm-health's own" end
    if rules.opt_out ~= "" and words(job.comment, "%S+")[rules.opt_out] then return "its user opted out" end
    local gpus = gpu_text(job)
    if rules.gpus and not string.find(gpus, "gpu", 1, true) then return "no GPUs" end
    if most_nodes(job, gpus) < rules.min_nodes then return "too few nodes" end
    if not named(rules.partitions, words(job.partition, "[^,]+")) then return "its partition" end
    if not named(rules.accounts, words(job.account, "[^,]+")) then return "its account" end
    if limit_min(job, part_list) < rules.min_time_min then return "too short" end
end

-- How long the check may take, in seconds; 0 for no limit.
local function check_limit_s(job, part_list)
    local share_s = 60 * rules.share * limit_min(job, part_list)
    if rules.share == 0 or share_s == math.huge then return rules.limit_s end
    if rules.limit_s == 0 then return share_s end
    return math.min(rules.limit_s, share_s)
end

return function(job, part_list)
    local reason = why_not(job, part_list)
    if reason then
        slurm.log_debug("slurm-health: not checked by default: %s", reason)
    else
        local limit = string.format("%.1f", check_limit_s(job, part_list))
        job.script = before_limit .. limit .. after_limit .. job.script
    end
end
