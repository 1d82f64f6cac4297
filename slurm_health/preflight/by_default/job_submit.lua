-- SPDX-License-Identifier: Apache-2.0
-- Written by slurm-health init default, where there was no job_submit.lua.
-- Whatever goes wrong in here, jobs are submitted as they are.
local loaded, check = pcall(dofile, @default@)
if not loaded then
    slurm.log_error("slurm-health: jobs are not checked by default: %s", tostring(check))
end

function slurm_job_submit(job_desc, part_list, submit_uid)
    if loaded then
        local worked, failure = pcall(check, job_desc, part_list)
        if not worked then
            slurm.log_error("slurm-health: a job is not checked: %s", tostring(failure))
        end
    end
    return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
    return slurm.SUCCESS
end

return slurm.SUCCESS
