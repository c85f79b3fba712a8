/* Startup of a Cortex-M: vectors, memory, a timer (SysTick). Output leaves by semihosting, to an emulator or a debugger. */
#include "board.h"

#include <stdlib.h>
#include <string.h>

#define REGISTER(address) (*(volatile uint32_t *)(address))
#define SYSTICK_CONTROL REGISTER(0xE000E010u)
#define SYSTICK_RELOAD REGISTER(0xE000E014u)
#define SYSTICK_VALUE REGISTER(0xE000E018u)
#define COPROCESSORS REGISTER(0xE000ED88u)

enum { ROUND = 1 << 24, UNUSED_STACK = 0x5a }; /* ticks until the timer starts again */

extern uint32_t board_data[], board_data_end[], board_data_from[], board_bss[], board_bss_end[]; /* cortex-m.ld */
extern uint8_t board_stack[], board_stack_end[];

int main(void);
void _exit(int code);
void initialise_monitor_handles(void); /* of newlib: opens the streams of semihosting */
void board_reset(void);

static volatile uint32_t rounds;

static void next_round(void)
{
    rounds++;
}

static void fault(void)
{
    _exit(3);
}

void board_reset(void)
{
    uint8_t *here = (uint8_t *)&here;
    uint8_t *byte;
    COPROCESSORS |= 0xfu << 20; /* the floating-point and vector units, where there are any */
    __asm volatile("dsb\n isb" ::: "memory");
    for (byte = board_stack; byte < here - 256; byte++) /* what lies below is not in use yet */
        *byte = UNUSED_STACK;
    memcpy(board_data, board_data_from, (size_t)((uint8_t *)board_data_end - (uint8_t *)board_data));
    memset(board_bss, 0, (size_t)((uint8_t *)board_bss_end - (uint8_t *)board_bss));
    initialise_monitor_handles();
    exit(main());
}

typedef union {
    void (*handler)(void);
    const void *stack;
} vector;

__attribute__((section(".vectors"), used)) static const vector vectors[16] = {
    {.stack = board_stack_end}, {board_reset}, {fault}, {fault}, {fault}, {fault}, {fault}, {fault},
    {fault}, {fault}, {fault}, {fault}, {fault}, {fault}, {fault}, {next_round},
};

void board_start(void)
{
    SYSTICK_CONTROL = 0;
    SYSTICK_RELOAD = ROUND - 1;
    SYSTICK_VALUE = 0;
    rounds = 0;
    SYSTICK_CONTROL = 7; /* the processor's clock, an interrupt at 0, on */
}

static uint64_t ticks(void)
{
    uint32_t before, value;
    do {
        before = rounds;
        value = SYSTICK_VALUE;
    } while (before != rounds);
    return (uint64_t)before * ROUND + (ROUND - 1 - value);
}

uint64_t board_instructions(void)
{
    return ticks() * 1000000000u / BOARD_HZ;
}

uint32_t board_stack_used(void)
{
    const uint8_t *byte = board_stack;
    while (byte < board_stack_end && *byte == UNUSED_STACK)
        byte++;
    return (uint32_t)(board_stack_end - byte);
}
