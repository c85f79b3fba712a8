/* What the example needs of a board: a timer and how much of the stack was used. */
#ifndef BOARD_H
#define BOARD_H

#include <stdint.h>

void board_start(void); /* the timer, from 0 */

/* Since the start: nanoseconds on a real board whose clock is BOARD_HZ; instructions where an emulator gives each one
   nanosecond, as the Makefile tells it to. The timer counts BOARD_HZ, so this is exact to a few dozens. */
uint64_t board_instructions(void);

uint32_t board_stack_used(void); /* bytes, at most so far */

#endif
