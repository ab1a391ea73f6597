# A guest that answers in shared memory: it writes the complement of the first word of BAR 2 of an
# ivshmem device (1af4:1110) to the word after it, for ever. QEMU starts it by -kernel (multiboot).

.intel_syntax noprefix
.section .text
.align 4
.long 0x1badb002, 0, -0x1badb002

.globl _start
_start:
    mov ebx, 0x80000000         # configuration address of 00:00.0
next:
    xor ecx, ecx
    call configuration
    cmp eax, 0x11101af4
    je found
    add ebx, 0x800              # the next slot, then the next bus
    cmp ebx, 0x81000000
    jne next
stop:
    hlt
    jmp stop
found:
    mov ecx, 0x1c               # the upper half of BAR 2: paging would be needed beyond 4 GiB
    call configuration
    test eax, eax
    jnz stop
    mov ecx, 0x18
    call configuration
    and eax, 0xfffffff0
    mov edi, eax
answer:
    mov eax, [edi]
    not eax
    mov [edi + 4], eax
    pause
    jmp answer

configuration:                  # eax = the register ecx of the function at ebx
    lea eax, [ebx + ecx]
    mov dx, 0xcf8
    out dx, eax
    mov dx, 0xcfc
    in eax, dx
    ret
