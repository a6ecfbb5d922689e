#include "textflag.h"

// Numbers of system calls (arch/x86/entry/syscalls/syscall_64.tbl).
#define SYS_read 0
#define SYS_write 1
#define SYS_clone 56
#define SYS_exit_group 231
#define SYS_close_range 436

#define SIGCHLD 17

// Offsets in the shared memory; they are in view.go, too.
#define COUNT 0
#define BYTE 8
#define PIECES 16
#define PIECE_SIZE 24

// func fork(shared, request, response uintptr) (pid int)
//
// The child never leaves this function and touches no stack: all it has is in registers, which system calls preserve but for AX,
// CX and R11. R12 is the shared memory, R13 and R9 are its ends of the two pipes.
TEXT ·fork(SB), NOSPLIT|NOFRAME, $0-32
	MOVQ shared+0(FP), R12
	MOVQ request+8(FP), R13
	MOVQ response+16(FP), R9
	MOVQ $SIGCHLD, DI
	XORL SI, SI
	XORL DX, DX
	XORL R10, R10
	XORL R8, R8
	MOVL $SYS_clone, AX
	SYSCALL
	TESTQ AX, AX
	JZ   child
	MOVQ AX, pid+24(FP)
	RET

child:
	// Close all but the two; the lower is kept in BX, the higher in R15. A range that is empty is refused, which is as good.
	MOVQ    R13, BX
	MOVQ    R9, R15
	CMPQ    BX, R15
	JLT     ordered
	XCHGQ   BX, R15
ordered:
	XORL    DI, DI
	LEAQ    -1(BX), SI
	XORL    DX, DX
	MOVL    $SYS_close_range, AX
	SYSCALL
	LEAQ    1(BX), DI
	LEAQ    -1(R15), SI
	XORL    DX, DX
	MOVL    $SYS_close_range, AX
	SYSCALL
	LEAQ    1(R15), DI
	MOVL    $0xffffffff, SI
	XORL    DX, DX
	MOVL    $SYS_close_range, AX
	SYSCALL

serve:
	MOVQ    R13, DI
	LEAQ    BYTE(R12), SI
	MOVL    $1, DX
	MOVL    $SYS_read, AX
	SYSCALL
	CMPQ    AX, $1
	JNE     exit // the parent closed its end, or is gone
	MOVQ    COUNT(R12), R15
	LEAQ    PIECES(R12), BX

piece:
	TESTQ   R15, R15
	JZ      answer
	MOVQ    0(BX), SI
	MOVQ    8(BX), DI
	MOVQ    16(BX), DX
	MOVQ    DX, CX
	SHRQ    $6, CX

block: // 64 bytes at a time: an emulated processor does string instructions byte by byte
	TESTQ   CX, CX
	JZ      rest
	MOVOU   0(SI), X0
	MOVOU   16(SI), X1
	MOVOU   32(SI), X2
	MOVOU   48(SI), X3
	MOVOU   X0, 0(DI)
	MOVOU   X1, 16(DI)
	MOVOU   X2, 32(DI)
	MOVOU   X3, 48(DI)
	ADDQ    $64, SI
	ADDQ    $64, DI
	DECQ    CX
	JMP     block

rest:
	MOVQ    DX, CX
	ANDQ    $63, CX
	CLD
	REP; MOVSB
	ADDQ    $PIECE_SIZE, BX
	DECQ    R15
	JMP     piece

answer:
	MOVQ    R9, DI
	LEAQ    BYTE(R12), SI
	MOVL    $1, DX
	MOVL    $SYS_write, AX
	SYSCALL
	CMPQ    AX, $1
	JEQ     serve

exit:
	XORL    DI, DI
	MOVL    $SYS_exit_group, AX
	SYSCALL
	INT     $3
