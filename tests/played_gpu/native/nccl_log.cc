// SPDX-License-Identifier: Apache-2.0
// NCCL's log, as NCCL_DEBUG, NCCL_DEBUG_SUBSYS and NCCL_DEBUG_FILE ask for it.
#include "nccl.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/syscall.h>
#include <unistd.h>

namespace played::nccl {
namespace {

std::mutex &mutex = *new std::mutex;
std::string &last = *new std::string;

std::string host() {
    char name[256] = "";
    gethostname(name, sizeof name - 1);
    return std::string(name).substr(0, std::string(name).find('.'));
}

// %h stands for the host, %p for the process.
FILE *opened() {
    const char *pattern = getenv("NCCL_DEBUG_FILE");
    if (!pattern || !*pattern) return stdout;
    std::string path;
    for (const char *c = pattern; *c; c++) {
        if (*c != '%') path += *c;
        else if (*++c == 'h') path += host();
        else if (*c == 'p') path += std::to_string(getpid());
        else if (*c == '%') path += '%';
        if (!*c) break;
    }
    FILE *file = fopen(path.c_str(), "we");
    return file ? file : stdout;
}

bool is_wanted(Level level, const char *subsystems) {
    const char *wanted = getenv("NCCL_DEBUG");
    if (!wanted) return false;
    const int most = !strcasecmp(wanted, "VERSION") ? 0 : !strcasecmp(wanted, "WARN") ? 1
                     : !strcasecmp(wanted, "INFO") || !strcasecmp(wanted, "TRACE")    ? 2 : -1;
    if ((int)level > most) return false;
    const char *chosen = getenv("NCCL_DEBUG_SUBSYS");
    if (level != Level::INFO) return true;
    const std::string among = std::string(",") + (chosen && *chosen ? chosen : "INIT,BOOTSTRAP,ENV") + ",";
    if (among.find(",ALL,") != std::string::npos) return true;
    for (std::string rest = subsystems; !rest.empty();) {
        const size_t comma = rest.find(',');
        if (among.find("," + rest.substr(0, comma) + ",") != std::string::npos) return true;
        rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
    }
    return false;
}

}  // namespace

void log(const Comm &comm, Level level, const std::string &text, const char *subsystems) {
    std::lock_guard<std::mutex> lock(mutex);
    if (level == Level::WARN) last = text;
    if (!is_wanted(level, subsystems)) return;
    static FILE *file = opened();
    if (level == Level::VERSION) fprintf(file, "%s\n", text.c_str());
    else fprintf(file, "%s%s:%d:%ld [%d] NCCL %s %s\n", level == Level::WARN ? "\n" : "", host().c_str(), getpid(),
                 syscall(SYS_gettid), comm.device, level == Level::WARN ? "WARN" : "INFO", text.c_str());
    fflush(file);
}

const char *last_error() {
    static thread_local std::string copy;
    std::lock_guard<std::mutex> lock(mutex);
    copy = last;
    return copy.c_str();
}

}  // namespace played::nccl
