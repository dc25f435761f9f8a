/* LD_PRELOAD: the wall clock of a process is CLOCK_OFF_BY_S seconds off; monotonic clocks and file times are not.
   (Debian's libfaketime stops Python 3.11's timed waits.) */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long off_by(void) {
    static long seconds;
    static int known;
    if (!known) {
        const char *given = getenv("CLOCK_OFF_BY_S");
        seconds = given ? atol(given) : 0;
        known = 1;
    }
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += off_by();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    now->tv_sec = fine.tv_sec;
    now->tv_usec = fine.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    if (now) *now = fine.tv_sec;
    return fine.tv_sec;
}
