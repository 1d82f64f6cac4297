// SPDX-License-Identifier: Apache-2.0
// A crash in what is played says so, so that nobody takes it for one of PyTorch or of a device.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <execinfo.h>
#include <unistd.h>

namespace {

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
constexpr int MOST_FRAMES = 64;
struct sigaction before[64];

// The directory of this library, where all that is played lies.
const char *own_directory() {
    static char directory[4096];
    Dl_info own;
    if (!directory[0] && dladdr((void *)own_directory, &own) && own.dli_fname) {
        strncpy(directory, own.dli_fname, sizeof directory - 1);
        if (char *slash = strrchr(directory, '/')) slash[1] = 0;
    }
    return directory;
}

bool is_played(void *address, Dl_info *found) {
    return dladdr(address, found) && found->dli_fname && *own_directory() &&
           !strncmp(found->dli_fname, own_directory(), strlen(own_directory()));
}

void say(int number) {
    void *frames[MOST_FRAMES];
    const int count = backtrace(frames, MOST_FRAMES);
    for (int i = 2; i < count; i++) {  // this function and the handler come first
        Dl_info found;
        if (!is_played(frames[i], &found)) continue;
        char line[512];
        const char *file = strrchr(found.dli_fname, '/');
        const int length = snprintf(line, sizeof line,
            "played CUDA: crashed in %s of %s (%s): a mistake of the player, of no device\n",
            found.dli_sname ? found.dli_sname : "?", file ? file + 1 : found.dli_fname, strsignal(number));
        if (write(2, line, (size_t)length) < 0) return;
        return;
    }
}

void handle(int number, siginfo_t *, void *) {
    say(number);
    sigaction(number, &before[number], nullptr);
    raise(number);
}

__attribute__((constructor)) void install() {
    void *frame;
    backtrace(&frame, 1);  // loads what a handler may not load
    own_directory();
    struct sigaction action {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    for (int number : SIGNALS) sigaction(number, &action, &before[number]);
}

}  // namespace
