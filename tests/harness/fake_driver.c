/* A fake GPU driver: the functions of libcuda.so.1 and libnvidia-ml.so.1 that hvdtrain calls.

The file that the variable FAKE_GPUS names describes the GPUs, in NVML's order. Each line is a
keyword and its value. A line "gpu" starts a GPU, a line "part" a part of the last GPU (MIG):

    driver 570.86        version of the driver
    nvml 9, cuda 802     error codes of nvmlInit and cuInit
    hang 1               NVML never answers; hang 2: CUDA neither
    gpu UUID             part UUID
    model NAME           bus ID                memory BYTES          used BYTES
    shared 1             the GPU has no memory of its own
    busy PERCENT         speed N: CUDA numbers fast GPUs first, unless CUDA_DEVICE_ORDER=PCI_BUS_ID
    ecc COUNT            volatile uncorrectable errors; without this line the model has no ECC
    pending_rows 1       failed_rows 1         pending_pages 1
    lost 15              error code of nvmlDeviceGetHandleByIndex
    process PID BYTES    a process that computes; the PID "children" stands for all children of the
                         calling process
*/
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 32, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, NO_DEVICE = 100 };

typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu, part; } Process;

typedef struct Device {
    char uuid[96], model[96], bus[32];
    unsigned long long memory, used;
    int busy, speed, shared, ecc, pending_rows, failed_rows, pending_pages, lost, parent, parts;
    char users[MOST][64];
    int user_count;
} Device;

static Device devices[MOST];
static int count, nvml_code, cuda_code, hangs;
static char driver[64] = "570.86";

static void read_file(void) {
    const char *path = getenv("FAKE_GPUS");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256], *value;
    Device *last = NULL;
    int gpu = -1;
    count = nvml_code = cuda_code = hangs = 0;
    memset(devices, 0, sizeof devices);
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        value = strchr(line, ' ');
        if (!value) continue;
        *value++ = 0;
        if (!strcmp(line, "gpu") || !strcmp(line, "part")) {
            last = &devices[count];
            last->busy = last->ecc = last->parent = -1;
            if (line[0] == 'p') {
                strcpy(last->bus, devices[gpu].bus);
                last->parent = gpu;
                devices[gpu].parts++;
            } else {
                gpu = count;
            }
            strcpy(last->uuid, value);
            count++;
        }
        else if (!strcmp(line, "driver")) strcpy(driver, value);
        else if (!strcmp(line, "nvml")) nvml_code = atoi(value);
        else if (!strcmp(line, "cuda")) cuda_code = atoi(value);
        else if (!strcmp(line, "hang")) hangs = atoi(value);
        else if (!strcmp(line, "model")) strcpy(last->model, value);
        else if (!strcmp(line, "bus")) strcpy(last->bus, value);
        else if (!strcmp(line, "memory")) last->memory = strtoull(value, NULL, 10);
        else if (!strcmp(line, "used")) last->used = strtoull(value, NULL, 10);
        else if (!strcmp(line, "shared")) last->shared = 1;
        else if (!strcmp(line, "busy")) last->busy = atoi(value);
        else if (!strcmp(line, "speed")) last->speed = atoi(value);
        else if (!strcmp(line, "ecc")) last->ecc = atoi(value);
        else if (!strcmp(line, "pending_rows")) last->pending_rows = 1;
        else if (!strcmp(line, "failed_rows")) last->failed_rows = 1;
        else if (!strcmp(line, "pending_pages")) last->pending_pages = 1;
        else if (!strcmp(line, "lost")) last->lost = atoi(value);
        else if (!strcmp(line, "process")) strcpy(last->users[last->user_count++], value);
        else abort();
    }
    if (file) fclose(file);
}

/* CUDA */

static Device *visible[MOST];
static int visible_count, cuda_started;

static void show(Device *device) {
    visible[visible_count++] = device;
}

/* The GPU or part that an entry of CUDA_VISIBLE_DEVICES names; NULL if it is invalid. */
static Device *named(const char *entry, Device **all, int total) {
    Device *match = NULL;
    char *end;
    long number = strtol(entry, &end, 10);
    if (*entry && !*end) return number >= 0 && number < total ? all[number] : NULL;
    if (strncmp(entry, "GPU-", 4) && strncmp(entry, "MIG-", 4)) return NULL;
    for (int i = 0; i < count; i++) {
        if (strncmp(devices[i].uuid, entry, strlen(entry))) continue;
        if (match) return NULL; /* ambiguous */
        match = &devices[i];
    }
    return match;
}

int cuInit(unsigned flags) {
    Device *all[MOST];
    int total = 0;
    const char *order = getenv("CUDA_DEVICE_ORDER"), *entries = getenv("CUDA_VISIBLE_DEVICES");
    if (cuda_started) return cuda_code;
    read_file();
    while (hangs > 1) pause();
    cuda_started = 1;
    for (int i = 0; i < count; i++) {
        int place = total;
        if (devices[i].parent >= 0) continue;
        if (!order || strcmp(order, "PCI_BUS_ID"))
            while (place > 0 && all[place - 1]->speed < devices[i].speed) place--;
        memmove(all + place + 1, all + place, (total++ - place) * sizeof *all);
        all[place] = &devices[i];
    }
    if (entries) {
        char *copy = strdup(entries), *entry;
        for (char *rest = copy; (entry = strsep(&rest, ","));) {
            Device *device = named(entry, all, total);
            if (!device) break;
            show(device);
        }
        free(copy);
    } else {
        for (int i = 0; i < total; i++) show(all[i]);
    }
    /* A process can use only one part, and can't use a divided GPU as a whole. */
    for (int i = 0; i < visible_count; i++)
        for (int k = 0; visible[i]->parts && k < count; k++)
            if (devices[k].parent == visible[i] - devices) visible[i] = &devices[k];
    for (int i = 0; i < visible_count; i++)
        if (visible[i]->parent >= 0) {
            visible[0] = visible[i];
            visible_count = 1;
        }
    if (!cuda_code && !visible_count) cuda_code = NO_DEVICE;
    return cuda_code;
}

int cuDeviceGetCount(int *result) {
    *result = visible_count;
    return 0;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return 0;
}

int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    const char *text = visible[device]->uuid + 4;
    for (int i = 0; i < 16; i++, text += 2) {
        if (*text == '-') text++;
        sscanf(text, "%2hhx", &uuid[i]);
    }
    return 0;
}

/* As the real function of this name does: it returns the GPU of a part. */
int cuDeviceGetUuid(unsigned char *uuid, int device) {
    Device *own = visible[device];
    int code;
    if (own->parent >= 0) visible[device] = &devices[own->parent];
    code = cuDeviceGetUuid_v2(uuid, device);
    visible[device] = own;
    return code;
}

int cuDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "%s", visible[device]->bus);
    return 0;
}

int cuDeviceGetName(char *text, int size, int device) {
    snprintf(text, size, "%s", visible[device]->model);
    return 0;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    *bytes = visible[device]->memory;
    return 0;
}

int cuGetErrorString(int code, const char **text) {
    *text = code == 802 ? "system not yet initialized" : "unknown error";
    return 0;
}

/* NVML */

int nvmlInitWithFlags(unsigned flags) {
    read_file();
    return nvml_code;
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, "%s", driver);
    return 0;
}

int nvmlDeviceGetCount_v2(unsigned *result) {
    read_file(); /* a test may have changed it */
    while (hangs) pause();
    *result = 0;
    for (int i = 0; i < count; i++) *result += devices[i].parent < 0;
    return nvml_code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **result) {
    for (int i = 0; i < count; i++)
        if (devices[i].parent < 0 && index-- == 0) {
            *result = &devices[i];
            return devices[i].lost;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
    *current = *pending = device->parts > 0;
    return device->parts ? 0 : NOT_SUPPORTED;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *result) {
    *result = 7;
    return 0;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **result) {
    for (int i = 0; i < count; i++)
        if (devices[i].parent == device - devices && index-- == 0) {
            *result = &devices[i];
            return 0;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(Device *device, char *text, unsigned size) {
    snprintf(text, size, "%s", device->uuid);
    return 0;
}

int nvmlDeviceGetName(Device *device, char *text, unsigned size) {
    snprintf(text, size, "%s", device->model);
    return 0;
}

int nvmlDeviceGetMemoryInfo(Device *device, unsigned long long *info) {
    info[0] = device->memory;
    info[1] = device->memory - device->used;
    info[2] = device->used;
    return device->shared ? NOT_SUPPORTED : 0;
}

int nvmlDeviceGetUtilizationRates(Device *device, unsigned *rates) {
    rates[0] = device->busy;
    rates[1] = 0;
    return device->busy < 0 || device->parent >= 0 ? NOT_SUPPORTED : 0;
}

int nvmlDeviceGetTotalEccErrors(Device *device, int kind, int counter, unsigned long long *result) {
    *result = kind == 1 && counter == 0 ? device->ecc : 0; /* uncorrected, volatile */
    return device->ecc < 0 ? NOT_SUPPORTED : 0;
}

int nvmlDeviceGetRemappedRows(Device *device, unsigned *corrected, unsigned *uncorrected,
                              unsigned *is_pending, unsigned *has_failed) {
    *corrected = *uncorrected = 0;
    *is_pending = device->pending_rows;
    *has_failed = device->failed_rows;
    return device->ecc < 0 ? NOT_SUPPORTED : 0;
}

int nvmlDeviceGetRetiredPagesPendingStatus(Device *device, unsigned *is_pending) {
    *is_pending = device->pending_pages;
    return device->ecc < 0 ? NOT_SUPPORTED : 0;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *size, Process *result) {
    Process found[MOST];
    unsigned total = 0;
    for (int i = 0; i < device->user_count; i++) {
        char who[64], path[96];
        unsigned long long bytes = 0;
        sscanf(device->users[i], "%63s %llu", who, &bytes);
        if (strcmp(who, "children")) {
            found[total++] = (Process){(unsigned)atoi(who), bytes, 0, 0};
            continue;
        }
        snprintf(path, sizeof path, "/proc/self/task/%d/children", getpid());
        FILE *file = fopen(path, "r");
        unsigned pid;
        while (file && fscanf(file, "%u", &pid) == 1) found[total++] = (Process){pid, bytes, 0, 0};
        if (file) fclose(file);
    }
    if (total > *size) {
        *size = total;
        return INSUFFICIENT_SIZE;
    }
    *size = total;
    memcpy(result, found, total * sizeof *found);
    return 0;
}
